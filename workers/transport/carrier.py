"""The protocol between a worker and its carrier. Two carriers: `local.py` (threads) and `rpc.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from .outbox import Answer, Key, Outbox

#: called in any thread, once for each pull: with the answer, or with the text of what went wrong, and since when it is
#: here, by `perf_counter_ns`
Deliver = Callable[[Answer | str, int], None]
#: the text for a peer that has left in good order
LEFT = "has left"


class Carrier(Protocol):
    """Carries pulls between the outboxes of workers."""

    worker: int
    num_workers: int
    outbox: Outbox

    def pull(self, peer: int, questions: Mapping[Key, Deliver], *, polled: bool) -> None:
        """Ask `peer` for every key of `questions`; return at once. Each is delivered once, when it is there.

        Args:
            polled: whether answers may wait for `poll`, and what it takes to receive them for the compute thread.
        """

    def say(self, peer: int, key: Key) -> None:
        """Let `peer` have `key`, which needs no answer, before the questions that are pulled next."""

    def flush(self) -> None:
        """Tell the peers now what has arrived from them, rather than with the next message."""

    def dispatch(self, busy: bool) -> None:
        """Send what the compute thread, which calls this, has gathered; `busy`: it has something else to do."""

    def poll(self) -> None:
        """Deliver what has come without a thread of the carrier. For the compute thread."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is something to look at; False: nothing came in time. May return for nothing."""

    def wake(self) -> None:
        """End the compute thread's `wait`, now or when it comes to it."""

    def settle(self, timeout_s: float) -> None:
        """Wait, but not for longer, until what has been sent would outlive this process."""

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Return (peer's `perf_counter_ns` minus ours, half the round trip: the error of it)."""

    def close(self) -> None:
        """Leave: whoever pulls from here from now on is told so."""
