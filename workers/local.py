"""All workers as threads of one process: for tests, debuggers and machines with one device."""

from __future__ import annotations

from .outbox import Answer, Key, Outbox
from .transport import Deliver


class LocalTransport:
    """Carries pulls to the outboxes of the same process."""

    def __init__(self, worker: int, outboxes: list[Outbox]) -> None:
        self.worker = worker
        self.num_workers = len(outboxes)
        self.outbox = outboxes[worker]
        self._outboxes = outboxes

    def pull(self, peer: int, key: Key, deliver: Deliver) -> None:
        outbox = self._outboxes[peer]

        def reply(answer: Answer) -> None:
            deliver(answer)
            outbox.taken([key], self.worker)

        outbox.ask(key, self.worker, reply)

    def clock_offset(self, peer: int) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        pass
