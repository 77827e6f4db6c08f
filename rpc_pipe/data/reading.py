"""Batches made ahead of need, by a thread that reads in the order of positions."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dependency import ConfigError, Stalled
from ..workers.transport.payload import Tree, map_tensors, tensors_of
from .bijection import Numbers
from .order import Order
from .residency import Residency
from .source import Busy, Cause, Source, Wanted


class Share(NamedTuple):
    """A batch of one replica."""

    #: positions of its samples
    begin: int
    end: int
    #: positions at which the batch of all replicas begins and ends
    start: int
    after: int


class Shares(NamedTuple):
    """How positions are dealt to batches and replicas."""

    rows: int
    replica: int
    replicas: int
    #: positions in all; None: without end
    total: int | None

    def at(self, start: int) -> Share | None:
        """Return the batch that begins at `start`, None behind the last."""
        rows = self.rows if self.total is None else min(self.rows, self.total - start)
        if rows < self.replicas:  # none of the replicas may be without rows while others have some
            return None
        begin, end = (start + rows * number // self.replicas for number in (self.replica, self.replica + 1))
        return Share(begin, end, start, start + rows)


class Reader:
    """Makes batches in a thread of its own.

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
        #: batches that are ready, by the position at which they begin, and their bytes
        self._ready: deque[tuple[int, Tree | BaseException, int]] = deque()
        #: where the next batch that is taken begins, and whether the thread has been told to end
        self._next = -1
        self._stop = False

    def take(self, start: int, wanted: Wanted) -> tuple[tuple[Tree, Tree], int, Cause]:
        """Return the batch that begins at `start`, how many ns it was waited for, and what for mostly.

        Raises:
            DataError: a shard cannot be read.
            Stalled: it takes too long.
        """
        begun, before = time.perf_counter_ns(), self.busy.spent()
        if start != self._next or not wanted == self._wanted or self._thread is None:
            self._restart(start, wanted)
        with self._changed:
            # A shard that does not come is told by its name before.
            if not self._changed.wait_for(lambda: self._ready, 2 * self._timeout_s):
                waited, cause = 2 * self._timeout_s, self.busy.worst(before)
                raise Stalled(f"data {self._source.name}: no batch for {waited:g} s, busy with {cause}")
            _, made, _ = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(made, BaseException):
            self._end()
            raise made
        share = self._shares.at(start)
        self._next = -1 if share is None else share.after
        return made, time.perf_counter_ns() - begun, self.busy.worst(before)

    def _restart(self, start: int, wanted: Wanted) -> None:
        self._end()
        self._wanted, self._stop = wanted, False
        self._thread = threading.Thread(target=self._work, args=(start,), name="batches", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        if self._thread is not None:
            with self._changed:
                self._stop = True
                self._changed.notify_all()
            self._thread.join(self._timeout_s)
            self._thread = None
        self._ready.clear()
        self._next = -1

    def _work(self, start: int) -> None:
        share = self._shares.at(start)
        while share is not None:
            try:
                made: Tree | BaseException = self._batch(share)
                size = sum(tensor.nbytes for tensor in tensors_of(made))
            except BaseException as error:
                made, size = error, 0
            with self._changed:
                self._ready.append((share.start, made, size))
                self._changed.notify_all()
                if isinstance(made, BaseException):
                    return
                self._changed.wait_for(lambda: self._stop or not self._is_full())
                if self._stop:
                    return
            share = self._shares.at(share.after)

    def _is_full(self) -> bool:
        return bool(self._ready) and sum(size for _, _, size in self._ready) >= self._ahead_bytes

    def _batch(self, share: Share) -> tuple[Tree, Tree]:
        """Put the samples of a batch together, block by block, as chunks come and go."""
        parts: list[tuple[Tree, Tree]] = []
        where = []
        at = 0
        for segment in self._order.locate(share.begin, share.end):
            self.residency.enter(segment.epoch, segment.block)
            by_chunk = np.argsort(segment.chunks, kind="stable")
            borders = np.flatnonzero(np.diff(segment.chunks[by_chunk])) + 1
            for places in np.split(by_chunk, borders):
                chunk = self.residency.chunk(int(segment.chunks[places[0]]))
                with self.busy.on(chunk.cause):
                    parts.append(chunk.read(segment.numbers[places], self._wanted))
                where.append(places + at)
            at += len(segment.numbers)
        with self.busy.on("decode"):
            return _joined(parts, where)

    def close(self) -> None:
        """End the thread and let go of all chunks."""
        self._end()
        self.residency.close()
        self._source.close()


def _joined(parts: list[tuple[Tree, Tree]], where: list[Numbers]) -> tuple[Tree, Tree]:
    """Put rows of several chunks to their places in a batch.

    Raises:
        ConfigError: rows of different chunks have different forms.
    """
    columns = [list(tensors_of(part)) for part in parts]
    rows = [torch.from_numpy(places) for places in where]
    # By the first part's tensors: one may be an input and a target.
    joined = {id(column[0]): _column(list(column), rows) for column in zip(*columns, strict=True)}
    whole: tuple[Tree, Tree] = map_tensors(parts[0], lambda tensor: joined[id(tensor)])
    return whole


def _column(pieces: list[Tensor], rows: list[Tensor]) -> Tensor:
    first = pieces[0]
    column = first.new_empty((sum(map(len, rows)), *first.shape[1:]))
    for piece, places in zip(pieces, rows, strict=True):
        if piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype:
            raise ConfigError(
                f"data: samples differ in form: {first.dtype} {list(first.shape[1:])} and "
                f"{piece.dtype} {list(piece.shape[1:])}; rows of a batch must be alike"
            )
        column[places] = piece
    return column
