"""What a loader reads: chunks of rows, each of which is fetched as a whole; a sample is a row of a chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, NamedTuple

from ..dependency import ConfigError
from ..workers.transport.payload import Tree
from .bijection import Numbers

#: what may keep a batch from being there
Cause = Literal["disk", "network", "decode"]


class Wanted(NamedTuple):
    """What of a batch somebody uses."""

    inputs: bool = True
    targets: bool = True


#: everything
ALL = Wanted()


class Busy:
    """Counts what the loader's threads spend their time on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[Cause, float] = {"disk": 0.0, "network": 0.0, "decode": 0.0}
        #: by thread: what it is busy with now, and since when
        self._now: dict[int, tuple[Cause, float]] = {}

    @contextmanager
    def on(self, cause: Cause) -> Iterator[None]:
        """Charge the body to `cause`; what is charged inside it counts for the inner one alone."""
        outer = self._turn(cause)
        try:
            yield
        finally:
            self._turn(outer)

    def _turn(self, begins: Cause | None) -> Cause | None:
        """Let this thread be busy with something else; return with what it was."""
        thread = threading.get_ident()
        with self._lock:
            now = time.perf_counter()
            ends, since = self._now.pop(thread, (None, now))
            if ends is not None:
                self._spent[ends] += now - since
            if begins is not None:
                self._now[thread] = begins, now
        return ends

    def spent(self) -> dict[Cause, float]:
        """Return the seconds of each cause so far, those of what is going on included."""
        with self._lock:
            found, now = dict(self._spent), time.perf_counter()
            for cause, since in self._now.values():
                found[cause] += now - since
            return found

    def worst(self, before: dict[Cause, float]) -> Cause:
        """Return what took most since `spent` returned `before`."""
        after = self.spent()
        return max(after, key=lambda cause: after[cause] - before[cause])


class Source:
    """Samples in chunks; what a chunk is depends on the format."""

    #: as the user named it
    name: str
    #: the files, as errors name them
    shards: Sequence[str]
    #: samples of each chunk
    sizes: Numbers
    #: bytes of memory that each chunk takes when it is loaded
    num_bytes: Numbers
    #: bytes of all shards as they are stored
    stored_bytes: int
    #: bytes of one sample in a batch, inputs and targets together
    sample_bytes: int
    #: equal, almost surely, where the samples and their numbers are equal; in words, as errors show it
    identity: str
    #: what reading it takes time for
    busy: Busy
    #: whether `load` leaves out what is not wanted
    loads_parts = False

    @property
    def draws(self) -> bool:
        """Whether to make a sample random numbers are drawn from generators that the process has for everybody."""
        return False

    def load(self, chunk: int, wanted: Wanted = ALL) -> Any:
        """Bring what is wanted of a chunk into memory, or more where that is cheaper; return it for `rows`.

        Several threads may ask.

        Raises:
            DataError: a shard is missing, truncated or unreadable.
        """
        raise NotImplementedError

    def rows(self, held: Any, numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        """Return what is wanted of these samples of a chunk: tensors with a row for each, for `batch`.

        Args:
            held: the chunk, as `load` gave it.
            keyed: what random numbers of samples are keyed by, with the sample; None: they draw none.
        """
        raise NotImplementedError

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return rows of chunks, put together, as (inputs, targets); None for what is not wanted."""
        inputs, targets = rows
        return inputs, targets

    def shard_of(self, chunk: int) -> str:
        """Return what errors call the place that a chunk comes from."""
        return self.name


def fields(row: Mapping[str, Any], said: str | Sequence[str]) -> Any:
    """Return what `row` has by one name, or by several as a dict."""
    return row[said] if isinstance(said, str) else {name: row[name] for name in said}


def need(module: str, what: str) -> Any:
    """Return a module of the extra `data`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise ConfigError(f"{what} needs {top}: pip install 'rpc-pipe[data]'") from error
