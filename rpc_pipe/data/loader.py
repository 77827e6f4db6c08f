"""Batches of data that may be larger than memory; the position is one integer.

    loader = Loader(tokens("tokens/", context=1024), rows=64)
    for loss in pipe.train(loader): ...

In a pipeline of layers the first stage's worker reads the inputs, the last stage's worker the targets, other workers
nothing. With a whole model every worker reads both.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from ..dependency import ConfigError, refuse_below
from ..model.batches.microbatches import LazyBatch, Microbatches, Pair, SomeRows
from ..model.batches.own_rows import LengthNeeds, OwnRows
from ..system.sizes import num_bytes
from ..workers.transport.payload import Tree
from .batch_making import Dealt, Reader, Share, chunk_memory, widest_window
from .by_length import group, grouped, joined
from .sample_order import Numbers, Order
from .source import Source, Wanted, dataset

#: of the memory, batches that are made ahead take this share at most
_AHEAD = 16
#: the text of a window in an identity
_WINDOW = re.compile(r", window (\d+)$")


class Loader:
    """Iterates over batches, (inputs, targets), from its position.

    Args:
        source: the data, such as `tokens(...)`, or a sequence of (inputs, target).
        rows: rows of a batch, of all pipelines together.
        seed: seed of the order; every epoch has another order.
        window: number of chunks in memory at a time, to mix samples of; by default the most that fit.
        memory: limit for chunks, chunks that come next, and batches made ahead; in bytes, or a text such as `2GB`.
        epochs: number of epochs before the iteration ends, with a smaller last batch if necessary; None: no end.
        shuffle: if False, samples keep the order of the source.
        readers: `users`: every worker reads the parts that it uses. `first`: only the worker of the first stage reads,
            and other workers pull from it; the source may then be a function, which only the first worker calls.
        pipeline, pipelines: number of this pipeline among several that train on the same data, and their count; each
            pipeline gets a share of every batch.
        timeout_s: how many seconds a batch may take.
        lengths: tokens of each sample of a `dataset`, in its order. Rows of similar length share a microbatch and are
            padded to its longest row; each label weighs as in the whole batch (docs/data.md). None: all equally long.
        most_tokens: of such a microbatch, padding included: the limit of memory.
        counted: labels of each sample that count, in its order: then replicas and members read their rows alone.
        next_token: whether a model that computes its loss itself shifts labels, so that the first does not count.

    Raises:
        ConfigError: an option cannot work.
    """

    def __init__(
        self,
        source: Source | Sequence[Any] | Callable[[], Any],
        *,
        rows: int,
        seed: int = 0,
        window: int | None = None,
        memory: int | str = "1GB",
        epochs: int | None = None,
        shuffle: bool = True,
        pipeline: int = 0,
        pipelines: int = 1,
        readers: Literal["users", "first"] = "users",
        timeout_s: float = 300.0,
        lengths: Sequence[int] | None = None,
        most_tokens: int | None = None,
        counted: Sequence[int] | None = None,
        next_token: bool = True,
    ) -> None:
        refuse_below(1, rows=rows, pipelines=pipelines, epochs=1 if epochs is None else epochs)
        if not 0 <= pipeline < pipelines or rows < pipelines:
            raise ConfigError(f"pipeline {pipeline} of {pipelines}: must be 0 to {pipelines - 1}, each with a row")
        if readers not in ("users", "first"):
            raise ConfigError(f"readers {readers!r}: must be users or first")
        if readers == "first" and epochs is not None:
            raise ConfigError(f"epochs {epochs}: others cannot know where one ends with readers='first'; count steps")
        if (lengths is None) != (most_tokens is None):
            raise ConfigError("lengths: needs most_tokens=, the most tokens of a microbatch, and that needs lengths=")
        if lengths is not None and readers == "first":
            raise ConfigError("readers='first': other workers cannot know the lengths of a batch; leave it out")
        if counted is not None and (lengths is None or len(counted) != len(lengths)):
            raise ConfigError("counted: needs lengths=, and as many numbers: labels that count, one for each sample")
        self.lengths, self.counted = (None if each is None else np.asarray(each) for each in (lengths, counted))
        self.most_tokens, self.next_token = most_tokens or 0, next_token
        self.rows, self.seed, self.readers = rows, seed, readers
        self._given, self._pipeline, self._pipelines, self._epochs = source, pipeline, pipelines, epochs
        self._memory, self._asked, self._shuffle, self.timeout_s = num_bytes(memory), window, shuffle, timeout_s
        self._position = 0
        #: whether a pipeline reports finished batches
        self._followed = False
        #: the identity that was loaded before the source is open
        self._told: str | None = None
        self._reader: Reader | None = None
        self._order: Order | None = None
        if readers == "users":
            _ = self.order

    @cached_property
    def source(self) -> Source:
        """The source of samples; with readers="first" only the reading worker opens it."""
        given = self._given
        source = given() if self.readers == "first" and not isinstance(given, Source) and callable(given) else given
        source = source if isinstance(source, Source) else dataset(source)
        if source.in_order and self._shuffle:
            raise ConfigError(f"shuffle=True: {source.name} comes in its order; take False, and shuffle it by datasets")
        return source if self.lengths is None else self._of_lengths(source, self.lengths)

    def _of_lengths(self, source: Source, lengths: Numbers) -> Source:
        """Return the source with samples that may differ in length."""
        samples = int(source.sizes.sum())
        if source.keeps_rows is None:
            raise ConfigError(f"lengths: samples of {source.name} are equally long; leave it out, or take dataset(...)")
        if lengths.shape != (samples,) or lengths.dtype.kind not in "iu" or lengths.min() < 1:
            raise ConfigError(f"lengths: must be {samples} whole numbers of at least 1, one for each sample")
        if lengths.max() > self.most_tokens:
            raise ConfigError(f"most_tokens={self.most_tokens}: the longest sample has {lengths.max()}; raise it")
        source = copy(source)
        source.keeps_rows = True
        return source

    @property
    def order(self) -> Order:
        """Which sample stands where."""
        if self._order is None:
            self._order = self._ordered(self._asked)
            if self._told is not None:
                self._follow_told(self._told)
        return self._order

    def _ordered(self, window: int | None) -> Order:
        widest = widest_window(self.source.num_bytes, self.room, self._memory)
        if window is not None and not 1 <= window <= max(widest, 1):
            raise ConfigError(f"window {window}: must be 1 to {widest} chunks; raise memory for more")
        return Order(self.source.sizes, self.seed, window or widest, self._shuffle)

    @property
    def room(self) -> int:
        """Bytes that chunks may take."""
        return chunk_memory(self._memory, self.ahead_bytes)

    @property
    def ahead_bytes(self) -> int:
        """Bytes that batches made ahead may take."""
        return max(2 * self.source.sample_bytes * self.rows // self._pipelines, self._memory // _AHEAD)

    @property
    def _shares(self) -> Dealt:
        total = None if self._epochs is None else self._epochs * self.order.num_samples
        return Dealt(self.rows, self._pipeline, self._pipelines, total)

    # --- where it is

    @property
    def window(self) -> int:
        """How many chunks are in memory at a time."""
        return self.order.window

    @property
    def position(self) -> int:
        """Number of samples up to the end of the last batch that was trained on, or else yielded."""
        return self._position

    @property
    def identity(self) -> str:
        """Names the data and their order: equal where the same position means the same sample."""
        order = f"seed {self.seed}" if self._shuffle else "in order"
        return f"{self.source.identity}; {order}, window {self.window}"

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: `position`, and the `identity` that it counts in."""
        return {"position": self._position, "identity": (self._told or "") if self._order is None else self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where another loader was. Rows, pipelines and workers may differ.

        Raises:
            ConfigError: it had other data, or another order.
        """
        told, position = str(state["identity"]), state["position"]
        if self._order is None:
            self._told = told  # compared where the data are
        else:
            self._follow_told(told)
        self.seek(position)

    def _follow_told(self, told: str) -> None:
        found = _WINDOW.search(told)
        if told != self.identity and found is not None and self._asked in (None, int(found[1])):
            if _WINDOW.sub("", told) == _WINDOW.sub("", self.identity):  # the limit of memory may be another
                self.close()
                self._order = self._ordered(int(found[1]))
        if told != self.identity:
            why = f"were {told} when the position was noted, and are {self.identity}"
            raise ConfigError(f"data {self.source.name}: {why}; resume with the same data, seed and window")

    def seek(self, position: int) -> None:
        """Go to a position, a number of samples since the start."""
        refuse_below(0, position=position)
        self._position, self._followed = position, False

    def samples(self, begin: int, end: int) -> Numbers:
        """Return which samples stand at positions `begin` … `end`-1, numbered as they are stored."""
        return self.order.samples(begin, end)

    # --- batches

    def __iter__(self) -> Iterator[Batch]:
        self._followed = False
        share = self._shares.at(self._position)
        while share is not None:
            if not self._followed:
                self._position = share.after
            yield (Batch if self.lengths is None else BatchByLength)(self, share)
            share = self._shares.at(share.after)

    def follow(self, share: Share) -> None:
        """Let batches count when they are done, not when they are yielded; the first is `share`."""
        if not self._followed:
            self._followed, self._position = True, share.start

    def done(self, share: Share) -> None:
        """Count a batch."""
        self._position = share.after

    def read(self, share: Share, wanted: Wanted, own: SomeRows | None = None) -> tuple[tuple[Tree, Tree], int, str]:
        """Return the wanted part of a batch, or of its rows `own`, the ns waited, and the main cause of the wait."""
        if self._reader is None:
            sizes = self.room, self.ahead_bytes
            self._reader = Reader(self.source, self.order, self._shares, *sizes, self.timeout_s)
            self._end_reader = weakref.finalize(self, self._reader.close)
        try:
            return self._reader.take(share.start, wanted, own)
        except BaseException:
            self.close()  # ends reads for batches that will not be taken
            raise

    @property
    def loads(self) -> int:
        """How many chunks this process has loaded since it began to read."""
        return 0 if self._reader is None else self._reader.residency.loads

    @property
    def peak_bytes(self) -> int:
        """Most bytes of chunks that were in memory at once since this process began to read."""
        return 0 if self._reader is None else self._reader.residency.peak_bytes

    def close(self) -> None:
        """Free memory and threads; reading starts again when the next batch is requested."""
        if self._reader is not None:
            self._end_reader()  # once, or every reader would be held as long as this
            self._reader = None


class Batch(LazyBatch):
    """(inputs, targets), read when they are looked at."""

    def __init__(self, loader: Loader, share: Share) -> None:
        self._loader, self._share = loader, share
        self.rows = share.end - share.begin
        self.scattered = loader.readers == "first"
        data = "the first worker's data" if self.scattered else loader.identity
        self.label = f"samples {share.begin}-{share.end - 1} in the order of {data}"
        self._both: tuple[Tree, Tree] | None = None

    @property
    def samples(self) -> Numbers:
        """The samples, numbered as they are stored."""
        return self._loader.samples(self._share.begin, self._share.end)

    def read(self, inputs: bool, targets: bool, own: SomeRows | None = None) -> tuple[Tree, Tree]:
        if not inputs and not targets:
            self._loader.close()  # nothing is read ahead from the old position
            return None, None
        found, self.waited_ns, self.waited_for = self._loader.read(self._share, Wanted(inputs, targets), own)
        return found

    def follow(self) -> None:
        self._loader.follow(self._share)

    def finished(self) -> None:
        self._loader.done(self._share)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tree]:
        return iter((self[0], self[1]))

    def __getitem__(self, index: int) -> Tree:
        if self._both is None:
            self._both = self.read(True, True)
        return self._both[index]


class RowsByLength(NamedTuple):
    """The rows of a process where all are grouped by length."""

    own: OwnRows
    needs: LengthNeeds
    loader: Loader

    def of(self, rows: int, begin: int) -> list[int]:
        """Return the rows of its microbatches, one after the other."""
        assert self.loader.lengths is not None
        lengths = self.loader.lengths[self.loader.samples(begin, begin + rows)].tolist()
        groups = group(tuple(lengths), self.needs, self.loader.most_tokens, self.needs.seconds)
        return [row for number in self.own.microbatches(len(groups)) for row in groups[number]]


class BatchByLength(Batch):
    """(inputs, targets) with rows that a pipeline groups by length; elsewhere all are padded to the longest."""

    def grouped(self, wanted: tuple[bool, bool], pair: Pair, needs: LengthNeeds, own: OwnRows | None) -> Microbatches:
        """Return the microbatches by length with the wanted ones of (inputs, targets), perhaps the rows `own` alone."""
        loader = self._loader
        counted = None if loader.counted is None else loader.counted[self.samples].tolist()
        rows = None if own is None or counted is None else RowsByLength(own, needs, loader)
        sides, how = super().read(*wanted, rows), (loader.most_tokens, loader.next_token)
        return grouped(self, sides, self._lengths, pair, needs, *how, counted, rows and own)

    @property
    def _lengths(self) -> tuple[int, ...]:
        assert self._loader.lengths is not None
        return tuple(self._loader.lengths[self.samples].tolist())

    def read(self, inputs: bool, targets: bool, own: SomeRows | None = None) -> tuple[Tree, Tree]:
        sides = zip(super().read(inputs, targets, own), (False, True), strict=True)
        first, last = (None if rows is None else joined(rows, self._lengths, targets) for rows, targets in sides)
        return first, last
