"""What a loader reads: samples in chunks, each of which is loaded as a whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..dependency import ConfigError
from .bijection import Numbers

if TYPE_CHECKING:
    from ..model.batches.lazy_batch import FieldSelection
    from ..workers.transport.payload import Tree

#: what may keep a batch from being there
Cause = Literal["disk", "network", "decode"]


class Wanted(NamedTuple):
    """What of a batch somebody uses; of dicts it may be some fields."""

    inputs: FieldSelection = True
    targets: FieldSelection = True

    def is_in(self, other: Wanted) -> bool:
        """Tell whether `other` wants all of this."""
        return all(
            a is False or b is True or (b and a is not True and a <= b) for a, b in zip(self, other, strict=True)
        )


#: everything
ALL = Wanted()


def among(fields: Iterable[str], some: FieldSelection) -> list[str]:
    """Return the fields that are wanted."""
    return [field for field in fields if some is True or (some and field in some)]


class Chunk:
    """Samples that are in memory together."""

    #: what random numbers of its samples are keyed by, with the sample; None: they draw none
    keyed: int | None = None

    def read(self, numbers: Numbers, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return (inputs, targets) of these samples of the chunk, a row each; None for what is not wanted."""
        raise NotImplementedError

    def deal(self, shares: Iterator[tuple[int, Numbers]]) -> None:
        """Hear, before anything is read, which samples will be read in which block, if the source lets go.

        Blocks and the samples of each ascend. Samples that are in no share will not be read.
        """

    def go_to(self, block: int) -> None:
        """Let go of the samples of blocks before `block`."""

    def close(self) -> None:
        """Let go of the memory."""


class Filling:
    """A batch that is made of rows of several chunks."""

    def put(self, chunk: Chunk, numbers: Numbers, places: Numbers) -> None:
        """Put these samples of a chunk to their places in the batch."""
        raise NotImplementedError

    def made(self) -> tuple[Tree, Tree]:
        """Return the batch, of which all places have been filled: (inputs, targets), None for what is not wanted."""
        raise NotImplementedError


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
    #: whether `load_fields` leaves out what is not wanted
    loads_fields = False
    #: whether chunks let go of samples that are behind, so that more of them fit into memory
    lets_go = False

    @property
    def draws(self) -> bool:
        """Whether to make a sample random numbers are drawn from generators that the process has for everybody."""
        return False

    @property
    def uniform(self) -> bool:
        """Whether all samples have the same form, so that who has seen one knows it of those that it does not read."""
        return True

    def load(self, chunk: int, busy: Busy) -> Chunk:
        """Bring a chunk into memory. Called in the loader's threads, several at once.

        Raises:
            DataError: a shard is missing, truncated or unreadable.
        """
        raise NotImplementedError

    def load_fields(self, chunk: int, busy: Busy, wanted: Wanted) -> Chunk:
        """Bring what is wanted of a chunk into memory, and more where that is cheaper. As `load`."""
        return self.load(chunk, busy)

    def filling(self, rows: int, wanted: Wanted) -> Filling | None:
        """Begin a batch of so many rows, where that is faster than to join what chunks read; None: it is not."""

    def shard_of(self, chunk: int) -> str:
        """Return what errors call the place that a chunk comes from."""
        return self.name

    def close(self) -> None:
        """Let go of what is open."""


class Busy:
    """Counts what the loader's threads spend their time on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[Cause, float] = {"disk": 0.0, "network": 0.0, "decode": 0.0}
        self._now: dict[int, tuple[Cause, float]] = {}

    @contextmanager
    def on(self, cause: Cause) -> Iterator[None]:
        """Charge the body to `cause`; what is charged inside it counts for the inner one alone."""
        thread, begin = threading.get_ident(), time.perf_counter()
        with self._lock:
            outer = self._now.get(thread)
            if outer is not None:
                self._spent[outer[0]] += begin - outer[1]
            self._now[thread] = cause, begin
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self._spent[cause] += end - self._now[thread][1]
                if outer is None:
                    del self._now[thread]
                else:
                    self._now[thread] = outer[0], end

    def spent(self) -> dict[Cause, float]:
        """Return the seconds of each cause so far, those of what is going on included."""
        now = time.perf_counter()
        with self._lock:
            found = dict(self._spent)
            for cause, since in self._now.values():
                found[cause] += now - since
        return found

    def worst(self, before: dict[Cause, float]) -> Cause:
        """Return what took most since `spent` returned `before`."""
        after = self.spent()
        return max(after, key=lambda cause: after[cause] - before[cause])


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
