"""What a compute thread sleeps on until something has come for it: rung by threads, and by other processes."""

from __future__ import annotations

import os
import select
import weakref
from contextlib import suppress

from .home import Home

_LONGEST_MS = 2**31 - 1


class Bell:
    """A pipe. Rings that nobody waits for are not lost, but may count as one.

    Args:
        home: where its one waiter wakes up; None: anywhere.

    A POSIX semaphore in shared memory was no faster: 8 workers on 2 cores, 2/4 ms a stage, 166 ms a step against 165.
    """

    def __init__(self, home: Home | None = None) -> None:
        self._home = home
        self._hear, ringing = os.pipe()
        weakref.finalize(self, os.close, self._hear)
        self._ringer = Ringer(ringing)
        os.set_blocking(self._hear, False)
        os.set_blocking(ringing, False)
        self._poll = select.poll()
        self._poll.register(self._hear, select.POLLIN)

    @property
    def descriptor(self) -> int:
        """Of this process, for `Ringer.of`."""
        return self._ringer.descriptor

    def ring(self) -> None:
        """Wake who waits, or who will."""
        self._ringer.ring()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the bell has rung since the last wait; False: it has not, in time. May wake for nothing."""
        home = self._home
        allowed = home.enter() if home is not None else None
        try:
            rung = self._poll.poll(min(1000 * timeout_s, _LONGEST_MS))
        finally:
            if home is not None and allowed:
                home.leave(allowed)
        if not rung:
            return False
        os.read(self._hear, 4096)
        return True


class Ringer:
    """What rings a bell.

    Args:
        descriptor: of the pipe's end, which does not block; closed when this is forgotten.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, process: int, descriptor: int) -> Ringer:
        """Return what rings the bell of another process of the same user.

        Raises:
            OSError: there is none.
        """
        return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    def ring(self) -> None:
        """Wake who waits, or who will, if there is anybody."""
        # BlockingIOError: it is full of rings. BrokenPipeError: its owner is gone.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.descriptor, b"\0")
