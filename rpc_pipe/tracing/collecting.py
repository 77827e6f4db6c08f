"""The last steps of all workers, collected by worker 0 at the end of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from pathlib import Path

from ..workers.hooks import StepRecord
from . import runs
from .board import LINES_AT, File
from .board_reader import Board, Events
from .boards import RunUpdate
from .history import History
from .remote_boards import COLLECT_S, EVERYTHING, NO_MORE, RemoteBoards

#: seconds between two looks
_PAUSE_S = 0.01


def collected(own: Mapping[int, File], folder: Path | None, carrier: RemoteBoards | None) -> History:
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


def _everybody(own: Mapping[int, File], folder: Path | None, carrier: RemoteBoards | None) -> RunUpdate:
    """Return the contents of all boards that can be read."""
    boards = {} if folder is None else runs.boards(folder)
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


def _ask_everything(carrier: RemoteBoards, peers: Sequence[int]) -> list[tuple[Events, list[StepRecord], int]]:
    """Request the boards of `peers`; return (events, steps in this worker's clock, clock error in ns) of each.

    Workers that have left, or do not answer in time, are left out.
    """
    clocks: dict[int, tuple[int, int]] = {}
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            clocks[peer] = carrier.clock_offset(peer)
    answers = _ask(carrier, clocks, EVERYTHING)
    found = []
    for peer, answer in answers.items():
        if answer:
            events = Events()
            found.append((events, events.read(answer[LINES_AT:], -clocks[peer][0]), clocks[peer][1]))
    return found


def tell_no_more(carrier: RemoteBoards, peers: Iterable[int]) -> None:
    """Tell `peers` that no more requests will come."""
    _ask(carrier, peers, NO_MORE)


def _ask(carrier: RemoteBoards, peers: Iterable[int], seen: int) -> dict[int, bytes]:
    asked: dict[int, futures.Future[bytes]] = {}
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            asked[peer] = carrier.look(peer, seen)
    answers, deadline = {}, time.monotonic() + COLLECT_S
    for peer, future in asked.items():
        with contextlib.suppress(RuntimeError, futures.TimeoutError):
            answers[peer] = future.result(max(0.0, deadline - time.monotonic()))
    return answers
