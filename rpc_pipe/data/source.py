"""The source of a loader: chunks of rows, each fetched as a whole; a sample is a row of a chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, NamedTuple

from ..dependency import ConfigError
from ..workers.transport.payload import Tree
from .bijection import Numbers

#: causes of a late batch
Cause = Literal["disk", "network", "decode"]


class Wanted(NamedTuple):
    """The parts of a batch that a worker uses."""

    inputs: bool = True
    targets: bool = True

    def of(self, sides: Iterable[Any], make: Callable[[Any], Any] = lambda side: side) -> tuple[Any, Any]:
        """Return `make` of each of (inputs, targets) that is wanted; None for the other."""
        inputs, targets = (make(side) if wanted else None for side, wanted in zip(sides, self, strict=True))
        return inputs, targets


#: everything
ALL = Wanted()


class Busy:
    """Counts the time of the loader's threads by cause. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[Cause, float] = {"disk": 0.0, "network": 0.0, "decode": 0.0}
        #: by thread: the cause that it is busy with, and its start
        self._now: dict[int, tuple[Cause, float]] = {}

    @contextmanager
    def on(self, cause: Cause) -> Iterator[None]:
        """Charge the body to `cause`; time charged inside it counts for the inner cause alone."""
        outer = self._turn(cause)
        try:
            yield
        finally:
            self._turn(outer)

    def _turn(self, begins: Cause | None) -> Cause | None:
        """Let this thread be busy with another cause; return the one before."""
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
        """Return the seconds of each cause so far, with the time of work that still runs."""
        with self._lock:
            found, now = dict(self._spent), time.perf_counter()
            for cause, since in self._now.values():
                found[cause] += now - since
            return found

    def worst(self, before: dict[Cause, float]) -> Cause:
        """Return the cause that took most since `spent` returned `before`."""
        after = self.spent()
        return max(after, key=lambda cause: after[cause] - before[cause])


class Source:
    """Samples in chunks; the format decides the chunks."""

    #: as the user named it
    name: str
    #: samples of each chunk
    sizes: Numbers
    #: bytes of memory that each chunk takes when it is loaded
    num_bytes: Numbers
    #: bytes of one sample in a batch, inputs and targets together
    sample_bytes: int
    #: equal, almost surely, where the samples and their numbers are equal; in words, as errors show it
    identity: str
    #: the cause that reading counts as
    busy: Busy
    #: whether chunks come only one after the other, as from a stream
    in_order = False
    #: whether `load` omits the parts that are not wanted
    loads_parts = False
    #: whether `rows` gives a list with (inputs, target) of each sample, which may differ in length; None: it cannot
    keeps_rows: bool | None = None

    @property
    def draws(self) -> bool:
        """Whether samples draw random numbers from the process's global generators."""
        return False

    def load(self, chunk: int, wanted: Wanted = ALL) -> Any:
        """Load the wanted part of a chunk into memory, or more where that is cheaper; return it for `rows`.

        Several threads may ask.

        Raises:
            DataError: a shard is missing, truncated or unreadable.
        """
        raise NotImplementedError

    def rows(self, held: Any, numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        """Return the wanted part of these samples of a chunk: tensors with a row for each, for `batch`.

        Args:
            held: the chunk, as `load` gave it.
            keyed: key of the samples' random numbers, together with the sample; None: they draw none.
        """
        raise NotImplementedError

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return rows of chunks, put together, as (inputs, targets); None for an unwanted part."""
        return wanted.of(rows)

    def shard_of(self, chunk: int) -> str:
        """Return the name of a chunk's place, for errors."""
        return self.name


def fields(row: Mapping[str, Any], said: str | Sequence[str]) -> Any:
    """Return the value of `row` under one name, or a dict for several names."""
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
        raise ConfigError(f"{what} needs {top}: pip install '.[data]'") from error
