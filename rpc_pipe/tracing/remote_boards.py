"""Requests for the boards of workers on other machines, as a carrier transports them. Loads without torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Protocol, runtime_checkable

#: in place of the number of the event seen last: everything is wanted; nothing will be asked any more
EVERYTHING, NO_MORE = 0, -2
#: most steps in a message; the latest are sent
MOST_SENT = 16
#: seconds that worker 0 waits for the end of the last step everywhere, and for answers
COLLECT_S = 2.0


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
