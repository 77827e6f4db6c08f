"""All workers as threads of one process: for tests, debuggers and machines with one device."""

from __future__ import annotations

import time

from ...dependency import PipeError
from .carrier import Carrier
from .outbox import Answer, Key
from .wakeup import ThreadWakeup


class LocalCarrier(Carrier):
    """Carries pulls to the outboxes of the same process.

    Args:
        group: all workers' carriers, by worker; one adds itself.
    """

    def __init__(self, worker: int, num_workers: int, group: dict[int, LocalCarrier]) -> None:
        super().__init__(worker, num_workers, ThreadWakeup())
        self._group = group
        group[worker] = self

    def _ask(self, peer: int, keys: list[Key]) -> None:
        self._group[peer]._asked(self.worker, keys)

    def _answer(self, peer: int, key: Key, answer: Answer | PipeError) -> bool:
        self._group[peer]._arrive(self.worker, key, answer, time.perf_counter_ns())
        return True


def local_carriers(num_workers: int) -> list[LocalCarrier]:
    """Return the carriers of all workers of a process."""
    group: dict[int, LocalCarrier] = {}
    return [LocalCarrier(worker, num_workers, group) for worker in range(num_workers)]
