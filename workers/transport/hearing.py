"""Receiving from sockets: on the compute thread while it waits, else on a thread for that.

    compute thread       waits, receives ── computes ── waits, receives ── computes for long ───── waits, receives
    receiver's thread    checks that the compute thread receives ─────────── takes over, receives ── checks

A message that a waiting compute thread receives by itself wakes one thread, where else it would wake two, one after the
other. Messages are taken in one after the other, on either thread.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import zmq

from .sockets import Frames, Sockets
from .wakeup import Wakeup

#: seconds between two checks of the receiver's thread that the compute thread still receives
_LOOK_S = 0.01


class Hearing:
    """Takes in messages, on a separate thread, and on the compute thread when that waits.

    Args:
        sockets: with messages from peers.
        wakeup: the compute thread sleeps on it, from now on also until a message arrives.
        take_in: called for each message.
        guard: entered for each message.
    """

    def __init__(
        self,
        sockets: Sequence[Sockets],
        wakeup: Wakeup,
        take_in: Callable[[Frames], None],
        guard: AbstractContextManager[None],
    ) -> None:
        self._sockets, self._take_in, self._guard = sockets, take_in, guard
        self._lock = threading.Lock()
        #: the receiver's thread sleeps on it, and the compute thread polls it
        self._sleeps_on, self._looks_at = select.poll(), select.poll()
        for by in sockets:
            self._sleeps_on.register(by.descriptor, select.POLLIN)
            self._looks_at.register(by.descriptor, select.POLLIN)
            wakeup.watch(by.descriptor)
        #: whether the compute thread receives; whether it waits, so receives at once; how often it has received
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
        """Take in the messages that have arrived, if the calling compute thread is the receiver."""
        if self._by_compute:
            self._times += 1
            if self._looks_at.poll(0):
                try:
                    self._hear()
                except KeyboardInterrupt:
                    self._hear()  # the descriptor signals new messages only when all have been received
                    raise

    def _hear(self) -> None:
        # Until there is nothing more: the descriptor signals only messages that arrive after that.
        with self._lock:
            for by in self._sockets:
                try:
                    while (pieces := by.hear()) is not None:
                        with self._guard:
                            self._take_in(pieces)
                except zmq.ContextTerminated:
                    self._over = True

    def _run(self) -> None:
        """Receive if the compute thread has not for a while, because it computes or runs the user's code."""
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
