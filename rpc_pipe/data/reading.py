"""Batches made ahead of need, by a thread that reads in the order of positions."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..dependency import Stalled
from ..workers.transport.payload import Tree, tensors_of
from .bijection import Numbers
from .joining import Joined
from .order import Order, Segment
from .residency import Residency
from .source import ALL, Busy, Cause, Source, Wanted

#: so many samples are located together, which takes hardly longer than for one batch
_LOCATED = 4096


#: what a batch was waited for that was ready
_NOTHING: Cause = "decode"


class Share(NamedTuple):
    """A batch of one pipeline."""

    #: positions of its samples
    begin: int
    end: int
    #: positions at which the batch of all pipelines begins and ends
    start: int
    after: int


class Shares(NamedTuple):
    """How positions are dealt to batches and pipelines."""

    rows: int
    pipeline: int
    pipelines: int
    #: positions in all; None: without end
    total: int | None

    def at(self, start: int) -> Share | None:
        """Return the batch that begins at `start`, None behind the last."""
        rows = self.rows if self.total is None else min(self.rows, self.total - start)
        if rows < self.pipelines:  # none of the pipelines may be without rows while others have some
            return None
        begin, end = (start + rows * number // self.pipelines for number in (self.pipeline, self.pipeline + 1))
        return Share(begin, end, start, start + rows)


class _Located:
    """The samples of one batch after the other: where each is found.

    Args:
        start: where the first batch begins.
    """

    def __init__(self, order: Order, shares: Shares, start: int) -> None:
        self._segments = self._all(order, shares, start)
        #: of a segment, what is behind
        self._segment: Segment | None = None
        self._behind = 0

    def take(self, count: int) -> Iterator[Segment]:
        """Yield where the next `count` samples are found."""
        while count:
            if self._segment is None or self._behind == len(self._segment.numbers):
                self._segment, self._behind = next(self._segments), 0
            begin, segment = self._behind, self._segment
            end = self._behind = min(begin + count, len(segment.numbers))
            count -= end - begin
            yield segment._replace(chunks=segment.chunks[begin:end], numbers=segment.numbers[begin:end])

    @staticmethod
    def _all(order: Order, shares: Shares, start: int) -> Iterator[Segment]:
        share = shares.at(start)
        while share is not None:
            positions: list[np.typing.NDArray[np.int64]] = []
            while share is not None and sum(map(len, positions)) < _LOCATED:
                positions.append(np.arange(share.begin, share.end))
                share = shares.at(share.after)
            yield from order.locate(np.concatenate(positions))


class Reader:
    """Makes batches in a thread of its own; those that draw random numbers in that of the caller, when they are taken.

    Args:
        room: bytes that chunks may take.
        ahead_bytes: bytes of batches that are made ahead; one batch always is.
        timeout_s: how long a batch may take.
    """

    def __init__(
        self, source: Source, order: Order, shares: Shares, room: int, ahead_bytes: int, timeout_s: float
    ) -> None:
        self.busy = Busy()
        self._source, self._order, self._shares = source, order, shares
        self._ahead_bytes, self._timeout_s = ahead_bytes, timeout_s
        epochs = None if shares.total is None else -(-shares.total // order.num_samples)
        self.residency = Residency(source, order, room, self.busy, timeout_s, epochs)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wanted = Wanted(False, False)
        #: batches that are ready, the next one first, each with its bytes; and the bytes of all
        self._ready: deque[tuple[Tree | BaseException, int]] = deque()
        self._ready_bytes = 0
        #: where the next batch that is taken begins, and whether the thread has been told to end
        self._next = -1
        self._stop = False
        self._located = _Located(order, shares, 0)

    def take(self, start: int, wanted: Wanted) -> tuple[tuple[Tree, Tree], int, Cause]:
        """Return the batch that begins at `start`, how many ns it was waited for, and what for mostly.

        Raises:
            DataError: a shard cannot be read.
            Stalled: it takes too long.
        """
        if start != self._next or not wanted == self._wanted:
            self._restart(start, wanted)
        share = self._shares.at(start)
        assert share is not None, "there is no such batch"
        if self._source.draws:
            return self._make(share)
        waited_ns, cause = 0, _NOTHING
        with self._changed:
            if not self._ready:
                waited_ns, cause = self._wait()
            made, size = self._ready.popleft()
            self._ready_bytes -= size
            self._changed.notify_all()
        if isinstance(made, BaseException):
            self._end()
            raise made
        self._next = share.after
        return made, waited_ns, cause

    def _make(self, share: Share) -> tuple[tuple[Tree, Tree], int, Cause]:
        """Make a batch here and now, as it draws random numbers; return it, how many ns that took, and what for."""
        begun, before = time.perf_counter_ns(), self.busy.spent()
        self._next = -1  # unless it can be made
        made = self._batch(self._located, share.end - share.begin)
        self._next = share.after
        return made, time.perf_counter_ns() - begun, self.busy.worst(before)

    def _wait(self) -> tuple[int, Cause]:
        """Wait for a batch; return how many ns, and what for mostly."""
        begun, before = time.perf_counter_ns(), self.busy.spent()
        most_s = 2 * self._timeout_s  # a shard that does not come is told by its name before
        if not self._changed.wait_for(lambda: self._ready, most_s):
            raise Stalled(f"data {self._source.name}: no batch for {most_s:g} s, busy with {self.busy.worst(before)}")
        return time.perf_counter_ns() - begun, self.busy.worst(before)

    def _restart(self, start: int, wanted: Wanted) -> None:
        thread = self._thread
        self._end()
        if thread is not None and thread.is_alive():  # what it makes would be taken for a batch of the next one
            raise Stalled(
                f"data {self._source.name}: has waited with a batch that nobody takes for {self._timeout_s:g} s; raise "
                "timeout_s"
            )
        self._wanted, self._stop = wanted, False
        if self._source.loads_fields and not wanted.is_in(self.residency.wanted):
            self.residency.drop()  # chunks that were loaded without fields that are wanted
        self.residency.wanted = wanted
        self._located = _Located(self._order, self._shares, start)
        if not self._source.draws:
            self._thread = threading.Thread(target=self._work, args=(start,), name="batches", daemon=True)
            self._thread.start()

    def _end(self) -> None:
        if self._thread is not None:
            with self._changed:
                self._stop = True
                self._changed.notify_all()
            if self._thread is not threading.current_thread():  # which may be the one that collects a loader
                self._thread.join(self._timeout_s)
            self._thread = None
        self._ready.clear()
        self._ready_bytes, self._next = 0, -1

    def _work(self, start: int) -> None:
        located, share = self._located, self._shares.at(start)
        while share is not None:
            try:
                made: Tree | BaseException = self._batch(located, share.end - share.begin)
                size = sum(tensor.nbytes for tensor in tensors_of(made))
            except BaseException as error:
                made, size = error, 0
            with self._changed:
                self._ready.append((made, size))
                self._ready_bytes += size
                self._changed.notify_all()
                if isinstance(made, BaseException):
                    return
                self._changed.wait_for(lambda: self._stop or not self._is_full())
                if self._stop:
                    return
            share = self._shares.at(share.after)

    def _is_full(self) -> bool:
        return bool(self._ready) and self._ready_bytes >= self._ahead_bytes

    def _batch(self, located: _Located, rows: int) -> tuple[Tree, Tree]:
        """Put the next rows together, block by block, as chunks come and go."""
        filling = self._source.filling(rows, self._wanted) or Joined(self._wanted)
        for segment, chunk, numbers, places in _by_chunk(located.take(rows)):
            self.residency.enter(segment.epoch, segment.block, segment.chunks)
            held = self.residency.chunk(chunk)
            with self.busy.on("decode"):
                filling.put(held, numbers, places)
        with self.busy.on("decode"):
            return filling.made()

    def close(self) -> None:
        """End the thread and let go of all chunks."""
        self._end()
        self.residency.close()
        self._source.close()


def _by_chunk(segments: Iterable[Segment]) -> Iterator[tuple[Segment, int, Numbers, Numbers]]:
    """Yield the samples of a batch chunk by chunk: where they are, their chunk and numbers, and places in the batch."""
    at = 0
    for segment in segments:
        by_chunk = np.argsort(segment.chunks, kind="stable")
        chunks, numbers = segment.chunks[by_chunk], segment.numbers[by_chunk]
        borders = np.flatnonzero(np.diff(chunks)) + 1
        for begin, end in pairwise([0, *borders.tolist(), len(chunks)]):
            yield segment, int(chunks[begin]), numbers[begin:end], by_chunk[begin:end] + at
        at += len(chunks)


def look(source: Source, order: Order, shares: Shares, start: int, timeout_s: float) -> tuple[Tree, Tree]:
    """Return the whole batch that begins at `start`, and keep nothing: its chunks are loaded one by one and let go of.

    Raises:
        DataError: a shard cannot be read.
        Stalled: it takes too long.
    """
    share, busy, draws = shares.at(start), Busy(), source.draws
    assert share is not None, "there is no such batch"
    rows = share.end - share.begin

    def made() -> tuple[Tree, Tree]:
        filling = source.filling(rows, ALL) or Joined(ALL)
        for segment, chunk, numbers, places in _by_chunk(_Located(order, shares, start).take(rows)):
            held = source.load(chunk, busy)
            if draws:
                held.keyed = order.epoch(segment.epoch).drawn
            filling.put(held, numbers, places)
            held.close()
        return filling.made()

    pool = ThreadPoolExecutor(1, "first batch")
    try:
        return pool.submit(made).result(timeout_s)
    except TimeoutError as error:
        raise Stalled(f"data {source.name}: no batch for {timeout_s:g} s; raise timeout_s") from error
    finally:
        pool.shutdown(wait=False)
