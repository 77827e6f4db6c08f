"""Batches made ahead of need, by a thread that reads in the order of positions."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dependency import ConfigError, Stalled
from ..model.batches.lazy_batch import SomeRows
from ..workers.transport.payload import Tree, map_tensors, tensors_of
from .bijection import Numbers
from .residency import Residency
from .sample_order import Order, Segment
from .source import Cause, Source, Wanted

#: samples that are located together, which takes hardly longer than for one batch
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
    share = shares.at(start)
    while share is not None:
        batches: list[Numbers] = []
        while share is not None and sum(map(len, batches)) < _LOCATED:
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
        ahead_bytes: bytes of batches that are made ahead, one batch at least.
        timeout_s: seconds that a batch may take.
    """

    def __init__(
        self, source: Source, order: Order, shares: Dealt, room: int, ahead_bytes: int, timeout_s: float
    ) -> None:
        self._source, self._order, self._shares, self._timeout_s = source, order, shares, timeout_s
        self._num_ahead = max(1, ahead_bytes // (source.sample_bytes * shares.rows // shares.pipelines + 1))
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
            raise ConfigError(
                f"data: samples differ in form: {first.dtype} {list(first.shape[1:])} and "
                f"{piece.dtype} {list(piece.shape[1:])}; rows of a batch must be alike"
            )
    return torch.cat(pieces)
