"""Requests for the boards of workers on other machines, and their answers. Loads without torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Protocol, runtime_checkable

from ..workers.hooks import StepRecord
from .board import LINES_AT, Events

#: in place of the number of the event seen last: everything is wanted; nothing will be asked any more
EVERYTHING, NO_MORE = 0, -2
#: most steps in a message; the latest are sent
MOST_SENT = 16


@runtime_checkable
class RemoteBoards(Protocol):
    """A carrier that transports boards of other machines."""

    worker: int
    num_workers: int
    #: answers requests for this worker's board: number of the event seen last, EVERYTHING or NO_MORE -> bytes
    serve_board: Callable[[int], bytes] | None

    def look(self, peer: int, seen: int) -> futures.Future[bytes]:
        """Request the answer of `serve_board` on `peer`."""

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Return (peer's clock minus ours, error), in ns."""

    def end_calls(self) -> None:
        """Announce that this worker makes no more calls; others that wait for one get an error."""

    @property
    def failed(self) -> bool:
        """Whether this worker has reported a failure to the others."""

    @property
    def asked_in_vain(self) -> bool:
        """Whether others may wait for results of a step that this worker has abandoned."""


def ask_everything(
    carrier: RemoteBoards, peers: Sequence[int], timeout_s: float
) -> list[tuple[Events, list[StepRecord], int]]:
    """Request the boards of `peers`; return (events, steps in this worker's clock, clock error in ns) of each.

    Workers that have left, or do not answer in time, are left out.
    """
    clocks: dict[int, tuple[int, int]] = {}
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            clocks[peer] = carrier.clock_offset(peer)
    answers = _ask(carrier, clocks, EVERYTHING, timeout_s)
    found = []
    for peer, answer in answers.items():
        if answer:
            events = Events()
            found.append((events, events.read(answer[LINES_AT:], -clocks[peer][0]), clocks[peer][1]))
    return found


def tell_no_more(carrier: RemoteBoards, peers: Iterable[int], timeout_s: float) -> None:
    """Tell `peers` that no more requests will come."""
    _ask(carrier, peers, NO_MORE, timeout_s)


def _ask(carrier: RemoteBoards, peers: Iterable[int], seen: int, timeout_s: float) -> dict[int, bytes]:
    asked: dict[int, futures.Future[bytes]] = {}
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            asked[peer] = carrier.look(peer, seen)
    answers, deadline = {}, time.monotonic() + timeout_s
    for peer, future in asked.items():
        with contextlib.suppress(RuntimeError, futures.TimeoutError):
            answers[peer] = future.result(max(0.0, deadline - time.monotonic()))
    return answers
