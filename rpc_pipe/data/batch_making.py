"""Batches made ahead of need, by a thread that reads chunks in the order of positions."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dependency import ConfigError, Stalled
from ..model.batches.microbatches import SomeRows
from ..system.sizes import format_bytes
from ..workers.transport.payload import Tree, map_tensors, tensors_of
from .sample_order import Numbers, Order, Segment
from .source import ALL, Cause, Source, Wanted

#: chunks that are loaded at once
_LOADERS = 2
_FEW = 64
#: share of the memory for chunks that is kept for the next chunks
_AHEAD = 8
#: batches that are made ahead: without an end, the thread that makes small ones takes half of the time from training
_MOST_AHEAD = 32
#: of the user's limit, this share is for chunks and batches; the rest is left to the allocator and the interpreter
_USED = 0.8


def chunk_memory(memory: int, batch_bytes: int) -> int:
    """Return how many bytes of `memory` chunks may take, beside batches of this size that are made ahead."""
    return int(_USED * memory) - batch_bytes


def widest_window(num_bytes: Numbers, room: int, memory: int) -> int:
    """Return how many chunks may take part in a block, so that they and the next one always fit into `room` bytes.

    Raises:
        ConfigError: not even one and the next.
    """
    largest = np.sort(num_bytes)[::-1]
    if int(largest.sum()) <= room:
        return len(largest)
    spare = max(int(largest[0]), room // _AHEAD)
    window = int(np.searchsorted(np.cumsum(largest), room - spare, side="right"))
    if window < 1:
        both = 2 * int(largest[0])
        least = (both + max(memory * _USED - room, both / _AHEAD)) / _USED
        fix = f"needs {format_bytes(1.01 * least)}, or chunks smaller than {format_bytes(largest[0])}"
        raise ConfigError(f"memory {format_bytes(memory)}: two chunks and batches must fit; {fix}")
    return window


class Residency:
    """Holds chunks, loads and drops them. Used by one thread; other threads load chunks.

    Args:
        room: bytes that chunks may take.
        epochs: number of epochs to be read; None: no end.
        timeout_s: seconds that loading a chunk may take.
    """

    def __init__(self, source: Source, order: Order, room: int, timeout_s: float, epochs: int | None = None) -> None:
        self._source, self._order, self._room, self._timeout_s = source, order, room, timeout_s
        self._epochs = epochs
        #: the parts that are read of chunks loaded from now on
        self.wanted: Wanted = ALL
        self._pool = ThreadPoolExecutor(1 if source.in_order else _LOADERS, "chunks")
        self._held: dict[int, Future[Any]] = {}
        self._bytes, self._smallest = 0, max(1, int(source.num_bytes.min()))
        self._at: tuple[int, int] | None = None
        #: chunks that were loaded so far, and the most bytes ever held
        self.loads = 0
        self.peak_bytes = 0

    def enter(self, epoch: int, block: int, soon: Numbers | None = None) -> None:
        """Load the chunks of the block, and the most of the next chunks that fit.

        Args:
            soon: the chunks of the next samples, which come first.
        """
        if self._at == (epoch, block):
            return
        self._at = epoch, block
        window: list[int] = self._order.epoch(epoch).resident(block).tolist()
        needed = set(window)
        if soon is not None and not needed <= self._held.keys():
            window = list(dict.fromkeys([*soon.tolist(), *window]))
        for chunk in window:
            if chunk not in self._held:
                self._free(chunk, needed)
                self._load(chunk)
        most = min(len(self._source.num_bytes), max(1, self._room // self._smallest))
        for chunk in islice(self._next(epoch, block), most):
            needed.add(chunk)
            if chunk not in self._held:
                if not self._free(chunk, needed):
                    break
                self._load(chunk)

    def chunk(self, number: int) -> Any:
        """Wait for a chunk of the block.

        Raises:
            DataError: it cannot be loaded.
            Stalled: it takes too long.
        """
        loading = self._held[number]
        try:
            return loading.result(self._timeout_s)
        except (TimeoutError, FutureTimeoutError) as error:
            if loading.done():  # the storage itself raised a timeout
                raise
            shard = self._source.shard_of(number)
            raise Stalled(f"shard {shard}: has not been loaded for {self._timeout_s:g} s; raise timeout_s") from error

    def _next(self, epoch: int, block: int) -> Iterator[int]:
        """Yield the chunks that come after the block."""
        place = block + self._order.epoch(epoch).window
        while self._epochs is None or epoch < self._epochs:
            chunks = self._order.epoch(epoch).chunks
            for begin in range(place, len(chunks), _FEW):  # there may be very many, and few are needed
                yield from chunks[begin : begin + _FEW].tolist()
            epoch, place = epoch + 1, 0

    def _load(self, chunk: int) -> None:
        self.loads += 1
        self._bytes += int(self._source.num_bytes[chunk])
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._held[chunk] = self._pool.submit(self._source.load, chunk, self.wanted)

    def _free(self, wanted: int, needed: set[int]) -> bool:
        """Drop the chunks needed last until there is room for the chunk `wanted`; return whether there is room."""
        size = int(self._source.num_bytes[wanted])
        if self._bytes + size <= self._room:
            return True
        others = [chunk for chunk in self._held if chunk not in needed]
        for chunk in sorted(others, key=lambda chunk: -self._next_use(chunk)):
            self._drop(chunk)
            if self._bytes + size <= self._room:
                return True
        return False

    def _next_use(self, chunk: int) -> int:
        """Return how many chunks come before this one does, from the block that is read on."""
        assert self._at is not None
        epoch, block = self._at
        here, next_one = (int(self._order.epoch(number).places[chunk]) for number in (epoch, epoch + 1))
        return here if here >= block else self._order.num_chunks + next_one

    def _drop(self, chunk: int) -> None:
        self._held.pop(chunk).cancel()
        self._bytes -= int(self._source.num_bytes[chunk])

    def drop(self) -> None:
        """Release all chunks."""
        self._at = None
        for chunk in list(self._held):
            self._drop(chunk)

    def close(self) -> None:
        """Drop everything, and end the threads."""
        self.drop()
        self._pool.shutdown(wait=False, cancel_futures=True)


#: samples that are located together, which takes hardly longer than for one batch; but each epoch takes its time
_LOCATED = 4096

#: a chunk, the numbers of its samples, and their places in the batch
Segmented = tuple[int, Numbers, Numbers]


class Share(NamedTuple):
    """A batch of one pipeline."""

    #: positions of its samples
    begin: int
    end: int
    #: positions where the batch of all pipelines begins and ends
    start: int
    after: int


class Dealt(NamedTuple):
    """How positions are dealt to batches and pipelines."""

    rows: int
    pipeline: int
    pipelines: int
    #: positions in all; None: without end
    total: int | None

    def at(self, start: int) -> Share | None:
        """Return the batch that begins at `start`, None behind the last."""
        rows = self.rows if self.total is None else min(self.rows, self.total - start)
        if rows < self.pipelines:  # every pipeline needs a row of each batch
            return None
        begin, end = (start + rows * number // self.pipelines for number in (self.pipeline, self.pipeline + 1))
        return Share(begin, end, start, start + rows)


def _located(
    order: Order, shares: Dealt, start: int, own: SomeRows | None = None
) -> Iterator[list[tuple[Segment, list[Segmented]]]]:
    """Yield the places of a batch's samples, or of the rows `own`, batch by batch and block by block."""
    share, most = shares.at(start), min(_LOCATED, order.num_samples)
    while share is not None:
        batches: list[Numbers] = []
        while share is not None and sum(map(len, batches)) < most:
            batch = np.arange(share.begin, share.end)
            batches.append(batch if own is None else batch[own.of(len(batch), share.begin)])
            share = shares.at(share.after)
        segments = list(order.locate(np.concatenate(batches)))
        blocks = np.repeat(np.arange(len(segments)), [len(each.numbers) for each in segments])
        chunks, numbers = (np.concatenate(part) for part in zip(*[each[2:] for each in segments], strict=True))
        begin = 0
        for batch in batches:
            end = begin + len(batch)
            pieces = _by_chunk(blocks[begin:end], chunks[begin:end], numbers[begin:end])
            yield [(segments[block], each) for block, each in pieces]
            begin = end


def _by_chunk(blocks: Numbers, chunks: Numbers, numbers: Numbers) -> Iterator[tuple[int, list[Segmented]]]:
    """Yield the blocks of a batch, each with its samples by chunk."""
    for block in np.unique(blocks).tolist():
        inside = np.flatnonzero(blocks == block)
        by_chunk = inside[np.argsort(chunks[inside], kind="stable")]
        borders = np.flatnonzero(np.diff(chunks[by_chunk])) + 1
        yield block, [(int(chunks[each[0]]), numbers[each], each) for each in np.split(by_chunk, borders)]


class Reader:
    """Makes batches in a thread; batches with random numbers are made in the caller's thread, when they are taken.

    Args:
        room: bytes that chunks may take.
        ahead_bytes: bytes of batches that are made ahead, one batch at least, and few enough not to disturb training.
        timeout_s: seconds that a batch may take.
    """

    def __init__(
        self, source: Source, order: Order, shares: Dealt, room: int, ahead_bytes: int, timeout_s: float
    ) -> None:
        self._source, self._order, self._shares, self._timeout_s = source, order, shares, timeout_s
        fitting = ahead_bytes // (source.sample_bytes * shares.rows // shares.pipelines + 1)
        self._num_ahead = max(1, min(_MOST_AHEAD, fitting))
        epochs = None if shares.total is None else -(-shares.total // order.num_samples)
        self.residency = Residency(source, order, room, timeout_s, epochs)
        self._batches: Iterator[tuple[Tree, Tree]] = iter(())
        #: the wanted parts of batches, the wanted rows, and the start of the next batch to be taken
        self._wanted, self._next = Wanted(False, False), -1
        self._own: SomeRows | None = None

    def take(self, start: int, wanted: Wanted, own: SomeRows | None = None) -> tuple[tuple[Tree, Tree], int, Cause]:
        """Return the batch that begins at `start`, or its rows `own`, the ns waited, and the main cause of the wait.

        Raises:
            DataError: a shard cannot be read.
            Stalled: the batch takes longer than `timeout_s`.
        """
        if (start, wanted, own) != (self._next, self._wanted, self._own):
            self._restart(start, wanted, own)
        share, busy = self._shares.at(start), self._source.busy
        assert share is not None, "there is no such batch"
        is_ready = isinstance(self._batches, _Ahead) and self._batches.is_ready
        begun, before = time.perf_counter_ns(), busy.spent()
        self._next = -1  # unless it can be made
        try:
            made = next(self._batches)
        except queue.Empty as error:
            most_s, cause = 2 * self._timeout_s, busy.worst(before)
            raise Stalled(f"data {self._source.name}: no batch for {most_s:g} s, busy with {cause}") from error
        self._next = share.after
        return made, 0 if is_ready else time.perf_counter_ns() - begun, busy.worst(before)

    def _restart(self, start: int, wanted: Wanted, own: SomeRows | None) -> None:
        if not self._end():  # the thread would load more chunks, for batches that will not be taken
            raise Stalled(f"data {self._source.name}: a batch was not taken for {self._timeout_s:g} s; raise timeout_s")
        had = self.residency.wanted
        if self._source.loads_parts and (wanted.inputs > had.inputs or wanted.targets > had.targets):
            self.residency.drop()  # the resident chunks lack the part that is wanted now
        self._wanted, self._own, self.residency.wanted = wanted, own, wanted
        batches = map(self._made, _located(self._order, self._shares, start, own))
        # A shard that does not arrive raises an error with its name before.
        self._batches = batches if self._source.draws else _Ahead(batches, self._num_ahead, 2 * self._timeout_s)

    def _end(self) -> bool:
        """End the thread that makes batches; return whether it has ended."""
        batches, self._batches, self._next = self._batches, iter(()), -1
        return not isinstance(batches, _Ahead) or batches.end(self._timeout_s)

    def _made(self, located: list[tuple[Segment, list[Segmented]]]) -> tuple[Tree, Tree]:
        """Put the rows of a batch together, block by block, as chunks are loaded and dropped."""
        parts: list[Tree] = []
        places: list[Numbers] = []
        source = self._source
        for segment, pieces in located:
            keyed = self._order.epoch(segment.epoch).drawn if source.draws else None
            self.residency.enter(segment.epoch, segment.block, np.array([chunk for chunk, *_ in pieces]))
            for chunk, numbers, at in pieces:
                held = self.residency.chunk(chunk)
                with source.busy.on("decode"):
                    parts.append(source.rows(held, numbers, self._wanted, keyed))
                places.append(at)
        with source.busy.on("decode"):
            if source.keeps_rows:
                rows = list(chain.from_iterable(parts))
                return source.batch([rows[at] for at in np.argsort(np.concatenate(places))], self._wanted)
            return source.batch(_joined(parts, places), self._wanted)

    def close(self) -> None:
        """End the thread and release all chunks."""
        self._end()
        self.residency.close()


class _Ahead(threading.Thread):
    """Takes batches from an iterator, in a thread that ends with the process, before they are asked for.

    Args:
        most: how many.
        timeout_s: how long one may take.
    """

    def __init__(self, batches: Iterator[tuple[Tree, Tree]], most: int, timeout_s: float) -> None:
        super().__init__(name="batches", daemon=True)
        self._batches, self._timeout_s = batches, timeout_s
        self._ready: queue.SimpleQueue[tuple[Tree, Tree] | BaseException] = queue.SimpleQueue()
        self._room, self._ends = threading.Semaphore(most), False
        self.start()

    def run(self) -> None:
        """Take them."""
        try:
            while self._room.acquire() and not self._ends:
                self._ready.put(next(self._batches))
        except BaseException as error:
            self._ready.put(error)

    @property
    def is_ready(self) -> bool:
        """Whether the next one needs not be waited for."""
        return not self._ready.empty()

    def __iter__(self) -> Iterator[tuple[Tree, Tree]]:
        return self

    def __next__(self) -> tuple[Tree, Tree]:
        made = self._ready.get(timeout=self._timeout_s)
        self._room.release()
        if isinstance(made, BaseException):
            raise made
        return made

    def end(self, timeout_s: float) -> bool:
        """Take no more; return whether the thread has ended; it may be the caller, when it collects a loader."""
        self._ends = True
        self._room.release()
        if self is not threading.current_thread():
            self.join(timeout_s)
        return not self.is_alive()


def _joined(parts: list[Tree], places: list[Numbers]) -> Tree:
    """Return rows that several chunks have, put to their places in a batch.

    Raises:
        ConfigError: rows of different chunks have different forms.
    """
    order = torch.from_numpy(np.argsort(np.concatenate(places)))
    columns = zip(*map(tensors_of, parts), strict=True)
    joined = {id(column[0]): _concatenated(column).index_select(0, order) for column in columns}
    return map_tensors(parts[0], lambda tensor: joined[id(tensor)])


def _concatenated(pieces: tuple[Tensor, ...]) -> Tensor:
    first = pieces[0]
    for piece in pieces:
        if piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype:
            forms = [f"{each.dtype} {list(each.shape[1:])}" for each in (first, piece)]
            raise ConfigError(f"data: samples differ in form: {' and '.join(forms)}; rows of a batch must be alike")
    return torch.cat(pieces)
