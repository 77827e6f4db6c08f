"""Wakeups of threads by threads of one process."""

from __future__ import annotations

import threading


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
