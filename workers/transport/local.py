"""All workers as threads of one process: for tests, debuggers and machines with one device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...dependency import PipeError
from .carrier import Carrier
from .outbox import Answer, Key

if TYPE_CHECKING:
    from .device_way import DeviceWay


class ThreadWakeup:
    """A `Wakeup` within a process, without descriptors.

    Workers that are threads lie in cycles of objects, which Python may collect only after hundreds of pipelines: pipes
    of them would use up the descriptors of a process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> None:
        """Wake the waiting thread; if none waits, the next wait returns at once."""
        try:
            self._lock.release()
        except RuntimeError:  # it was notified before
            pass

    def wait(self, timeout_s: float) -> bool:
        """Sleep until notified since the last wait; return False on timeout."""
        return self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))


class LocalPost:
    """Calls the carriers of the same process.

    Args:
        group: all workers' carriers, by worker; one adds that which opens this.
    """

    within_process = True

    def __init__(self, group: dict[int, Carrier]) -> None:
        self._group = group
        #: the device of payloads that another worker of it takes as they are
        self._device: Any = None
        self._wakeup = ThreadWakeup()
        self.notify = self._wakeup.notify

    def open(self, carrier: Carrier) -> None:
        self._worker = carrier.worker
        self._group[carrier.worker] = carrier

    def ask(self, peer: int, keys: list[Key]) -> None:
        self._group[peer].asked(self._worker, keys)

    def answer(self, peer: int, key: Key, answer: Answer | PipeError) -> bool:
        self._group[peer].arrive(self._worker, key, answer, time.perf_counter_ns())
        return True

    def use_device(self, way: DeviceWay | None) -> None:
        self._device = None if way is None else way.device

    def takes_from_device(self, peer: int, device: Any) -> bool:
        post = self._group[peer].post
        return isinstance(post, LocalPost) and post._device is not None and post._device == device

    def wait(self, timeout_s: float, there: Callable[[], bool]) -> bool:
        return there() or self._wakeup.wait(timeout_s)

    def wait_taken(self, timeout_s: float) -> None:
        self._wakeup.wait(timeout_s)

    def fail(self, failure: PipeError) -> None:
        """Questions are answered at once."""

    def poll(self) -> None:
        """Everything is brought at once."""

    close = poll

    def request(self, peer: int, what: str, value: Any = None) -> Future[Any]:
        """All workers of the process know it already."""
        known = Future[Any]()
        known.set_result(None)
        return known


def local_carriers(num_workers: int) -> list[Carrier]:
    """Return the carriers of all workers of a process."""
    group: dict[int, Carrier] = {}
    return [Carrier(worker, range(num_workers), LocalPost(group)) for worker in range(num_workers)]
