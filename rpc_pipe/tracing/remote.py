"""Boards of workers on other machines: the last steps at the end of a run, and mirrors while somebody watches.

    machine A                                       machine B
    watcher ──touches──> `watched`                  worker 3 ──writes──> its board
            ──reads───> worker 3's mirror <──pulls── `serve_board` shows it

Worker 0 collects the last steps of all. The first worker of each machine keeps the mirrors. It has at most one request
to each worker in flight, and none while nobody watches; what a slow link does not deliver in time is left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..workers.hooks import StepRecord
from . import run_folders
from .board import COLLECT_S, EVERYTHING, LINES_AT, NO_MORE, BoardWriter, File
from .board_reader import Board, Events, unpack_live
from .boards import RunUpdate, read_boards
from .history import History
from .run_folders import WATCHED

if TYPE_CHECKING:
    from ..workers.transport.carrier import Carrier

logger = logging.getLogger(__name__)

#: seconds between two looks
_PAUSE_S = 0.01
#: if that is older than this many seconds, nobody watches
_FRESH_S = 5.0
_PULL_EVERY_S = 0.5
#: how often clocks are compared again, as they drift
_COMPARE_EVERY_S = 60.0


def collected(own: Mapping[int, File], folder: Path | None, carrier: Carrier | None) -> History:
    """Return the last steps of all workers.

    Args:
        own: the boards of this process's workers.
        folder: where those of others are, if a launcher keeps them.
        carrier: to workers whose boards cannot be read here.
    """
    deadline = time.monotonic() + COLLECT_S
    last = max((record.step for file in own.values() for record in Board(file).records()), default=-1)
    while True:
        history = History()
        history.take(_everybody(own, folder, carrier))
        # The last step may not have ended on the other workers.
        if [last] == history.complete_steps(1) or last < 0 or time.monotonic() > deadline:
            return history
        time.sleep(_PAUSE_S)


def _everybody(own: Mapping[int, File], folder: Path | None, carrier: Carrier | None) -> RunUpdate:
    """Return the contents of all boards that can be read."""
    boards = {} if folder is None else read_boards(folder)
    boards = {worker: board for worker, board in boards.items() if "clock_error_ms" not in board.header}  # no mirrors
    boards |= {worker: Board(file) for worker, file in own.items()}
    update = RunUpdate()
    read: list[tuple[Events, list[StepRecord], int]] = [(board, board.records(), 0) for board in boards.values()]
    if carrier is not None:
        others = [worker for worker in range(carrier.num_workers) if worker not in boards]
        read += _ask_everything(carrier, others)
    for events, records, error_ns in read:
        worker = events.header["worker"]
        update.headers[worker] = events.header
        update.listings |= {(worker, count): listing for count, listing in events.listings.items()}
        update.records += records
        update.clock_error_ms = max(update.clock_error_ms, error_ns / 1e6)
    return update


def _ask_everything(carrier: Carrier, peers: Sequence[int]) -> list[tuple[Events, list[StepRecord], int]]:
    """Request the boards of `peers`; return (events, steps in this worker's clock, clock error in ns) of each.

    Workers that have left, or do not answer in time, are left out.
    """
    clocks: dict[int, tuple[int, int]] = {}
    for peer in peers:
        with suppress(RuntimeError):
            clocks[peer] = carrier.clock_offset(peer)
    answers = _ask(carrier, clocks, EVERYTHING)
    found = []
    for peer, answer in answers.items():
        if answer:
            events = Events()
            found.append((events, events.read(answer[LINES_AT:], -clocks[peer][0]), clocks[peer][1]))
    return found


def tell_no_more(carrier: Carrier, peers: Iterable[int]) -> None:
    """Tell `peers` that no more requests will come."""
    _ask(carrier, peers, NO_MORE)


def _ask(carrier: Carrier, peers: Iterable[int], seen: int) -> dict[int, bytes]:
    asked: dict[int, futures.Future[bytes]] = {}
    for peer in peers:
        with suppress(RuntimeError):
            asked[peer] = carrier.look(peer, seen)
    answers, deadline = {}, time.monotonic() + COLLECT_S
    for peer, future in asked.items():
        with suppress(RuntimeError, futures.TimeoutError):
            answers[peer] = future.result(max(0.0, deadline - time.monotonic()))
    return answers


class Mirror(threading.Thread):
    """A thread that keeps copies of other machines' boards in `folder` while somebody watches there."""

    def __init__(self, carrier: Carrier, folder: Path, remote: list[int]) -> None:
        super().__init__(name="mirror", daemon=True)
        self._folder = folder
        self._images = [_Image(carrier, folder, peer) for peer in remote]

    def run(self) -> None:
        while True:
            time.sleep(_PULL_EVERY_S)
            if _is_watched(self._folder):
                for image in self._images:
                    try:
                        image.refresh()
                    except Exception as error:  # the others can still be shown
                        logger.warning("worker %d cannot be shown here: %s", image.peer, error)
                        self._images = [other for other in self._images if other is not image]


def _is_watched(folder: Path) -> bool:
    try:
        return time.time() < (folder / WATCHED).stat().st_mtime + _FRESH_S
    except OSError:
        return False


class _Image:
    """A copy of one worker's board, in this machine's clock."""

    def __init__(self, carrier: Carrier, folder: Path, peer: int) -> None:
        self._carrier = carrier
        self._folder = folder
        self.peer = peer
        self._asked: futures.Future[bytes] | None = None
        self._events = Events()
        self._listed: set[int] = set()
        self._writer: BoardWriter | None = None
        self._offset_ns, self._error_ns = 0, 0
        self._compared = 0.0

    def refresh(self) -> None:
        """Write the last answer, if it has come, and send the next request."""
        if self._asked is not None:
            if not self._asked.done():
                return
            asked, self._asked = self._asked, None
            with suppress(RuntimeError):  # the peer has left, or does not show itself yet
                self._take(asked.result())
        with suppress(RuntimeError):
            if time.monotonic() > self._compared + _COMPARE_EVERY_S or not self._compared:
                offset, self._error_ns = self._carrier.clock_offset(self.peer)
                self._offset_ns, self._compared = -offset, time.monotonic()
            self._asked = self._carrier.look(self.peer, self._events.seen)

    def _take(self, answer: bytes) -> None:
        if not answer:
            return
        seen, made = self._events.seen, self._events.header.get("clock_ns")
        records = self._events.read(answer[LINES_AT:], self._offset_ns)
        if self._writer is None or self._events.header["clock_ns"] != made:
            if seen != EVERYTHING:  # it has made another pipeline
                self._events = Events()
                return
            # The process that keeps the copy is the one a watcher here can see; its stacks are not the worker's.
            own = {key: value for key, value in self._events.header.items() if key != "stacks_signal"}
            own |= {"process": run_folders.identity(), "clock_error_ms": self._error_ns / 1e6}
            self._writer, self._listed = BoardWriter(self._folder / f"worker-{self.peer}", own), set()
        for count, listing in self._events.listings.items():
            if count not in self._listed:
                self._listed.add(count)
                self._writer.list_program(listing)
        for record in records:
            self._writer.step_finished(record)
        self._writer.show(unpack_live(answer[:LINES_AT], self._offset_ns))
