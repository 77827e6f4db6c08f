"""All workers as threads of one process: for tests, debuggers and machines with one device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from .carrier import Deliver
from .outbox import Answer, Key, Outbox
from .wakeup import Wakeup


class LocalCarrier:
    """Carries pulls to the outboxes of the same process."""

    def __init__(self, worker: int, outboxes: list[Outbox]) -> None:
        self.worker = worker
        self.num_workers = len(outboxes)
        self.outbox = outboxes[worker]
        self._outboxes = outboxes
        self._wakeup = Wakeup()

    def say(self, peer: int, key: Key) -> None:
        self._outboxes[peer].ask(key, self.worker, lambda _: None)

    def pull(self, peer: int, questions: Mapping[Key, Deliver], *, polled: bool) -> None:
        for key, deliver in questions.items():
            self._outboxes[peer].ask(key, self.worker, partial(self._arrived, self._outboxes[peer], key, deliver))

    def _arrived(self, outbox: Outbox, key: Key, deliver: Deliver, answer: Answer) -> None:
        deliver(answer, time.perf_counter_ns())
        outbox.taken([key], self.worker)

    def flush(self) -> None:
        pass

    def dispatch(self, busy: bool) -> None:
        pass

    def poll(self) -> None:
        pass

    def wait(self, timeout_s: float) -> bool:
        return self._wakeup.wait(timeout_s)

    def wake(self) -> None:
        self._wakeup.notify()

    def settle(self, timeout_s: float) -> None:
        pass

    def clock_offset(self, peer: int) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self.outbox.end(self.worker)
