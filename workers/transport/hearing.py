"""Who hears what comes over sockets: the compute thread while it waits, else a thread for that.

    compute thread     waits, hears ── computes ── waits, hears ── computes for long ─────────── waits, hears
    hearer's thread    looks whether the other hears ──────────────────────── takes over, hears ── looks

A message that a waiting compute thread hears by itself wakes one thread, where else it would wake two, one after the
other. What is heard is taken in one message after the other, on whichever thread.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import zmq

from .sockets import Pieces, Sockets
from .wakeup import Wakeup

#: how often the hearer's thread looks whether the compute thread still hears
_LOOK_S = 0.01


class Hearing:
    """Takes in what comes, by a thread of its own, and by the compute thread when that waits.

    Args:
        sockets: by which others are heard.
        wakeup: what the compute thread sleeps on, from now on also until something comes.
        take_in: called for each message.
        guard: entered for each message.
    """

    def __init__(
        self,
        sockets: Sequence[Sockets],
        wakeup: Wakeup,
        take_in: Callable[[Pieces], None],
        guard: AbstractContextManager[None],
    ) -> None:
        self._sockets, self._take_in, self._guard = sockets, take_in, guard
        self._lock = threading.Lock()
        #: on which the hearer's thread sleeps, and the compute thread looks
        self._sleeps_on, self._looks_at = select.poll(), select.poll()
        for by in sockets:
            self._sleeps_on.register(by.descriptor, select.POLLIN)
            self._looks_at.register(by.descriptor, select.POLLIN)
            wakeup.watch(by.descriptor)
        #: whether the compute thread hears; whether it waits, so hears at once; how often it has heard
        self._by_compute = self._waits = False
        self._times = 0
        self._over = False
        threading.Thread(target=self._run, name="hearer", daemon=True).start()

    def wait(self, sleep: Callable[[], bool]) -> bool:
        """Let the compute thread sleep on the wakeup, by calling `sleep`; it is to look then."""
        self._by_compute = self._waits = True
        try:
            return sleep()
        finally:
            self._waits = False

    def look(self) -> None:
        """Take in what has come if it is the compute thread, which calls this, that hears."""
        if self._by_compute:
            self._times += 1
            if self._looks_at.poll(0):
                try:
                    self._hear()
                except KeyboardInterrupt:
                    self._hear()  # the rest, as the descriptor tells nothing of what comes until all has been heard
                    raise

    def _hear(self) -> None:
        # Until there is nothing more: the descriptor tells of what has come since then alone.
        with self._lock:
            for by in self._sockets:
                try:
                    while (pieces := by.hear()) is not None:
                        with self._guard:
                            self._take_in(pieces)
                except zmq.ContextTerminated:
                    self._over = True

    def _run(self) -> None:
        """Hear where the compute thread has not for a while, as it computes, or is the user's."""
        while not self._over:
            if self._by_compute:
                times = self._times
                time.sleep(_LOOK_S)
                if self._waits or self._times != times:
                    continue
                self._by_compute = False
            with self._guard:
                self._hear()
            if not self._over:
                self._sleeps_on.poll()
        for by in self._sockets:
            by.close_hearing()
