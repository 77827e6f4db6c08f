"""The protocol between a worker and its carrier. Two carriers: `local.py` (threads) and `rpc.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .outbox import Answer, Key, Outbox

#: called in any thread, once for each pull: with the answer, or with the text of what went wrong
Deliver = Callable[[Answer | str], None]


class Transport(Protocol):
    """Carries pulls between the outboxes of workers."""

    worker: int
    num_workers: int
    outbox: Outbox

    def pull(self, peer: int, key: Key, deliver: Deliver) -> None:
        """Ask `peer` for `key`; return at once. `deliver` is called when the answer is there.

        It is asked again under the hood where an answer may have been lost; there is one delivery.
        """

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Return (peer's `perf_counter_ns` minus ours, half the round trip: the error of it)."""

    def close(self) -> None:
        """Leave: no pull is answered any more."""
