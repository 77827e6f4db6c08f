"""What a compute thread sleeps on until something has come for it: rung by threads, or by other processes."""

from __future__ import annotations

import ctypes
import errno
import queue
import time
from typing import Any, Protocol


class Bell(Protocol):
    """Rings that nobody waits for are not lost, but may count as one."""

    def ring(self) -> None:
        """Wake who waits, or who will."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the bell has rung since the last wait; False: it has not, in time. May wake for nothing."""


class ThreadBell:
    """For threads of one process."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self, timeout_s: float) -> bool:
        try:
            self._rings.get(timeout=timeout_s)
        except queue.Empty:
            return False
        while not self._rings.empty():
            self._rings.get()
        return True


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


#: of sem_t on 64-bit Linux, with room
BELL_BYTES = 64
#: the system's clock may be set meanwhile, so it is asked again so often
_LONGEST_S = 1.0


class SharedBell:
    """A POSIX semaphore in memory that processes share (sem_overview(7)): one system call a sleep, one to end it.

    Args:
        memory: at least `BELL_BYTES` that stay mapped.
        new: whether it must be set up, by one of those who share it.
    """

    def __init__(self, memory: Any, *, new: bool) -> None:
        self._memory = (ctypes.c_char * BELL_BYTES).from_buffer(memory)
        self._at = ctypes.c_void_p(ctypes.addressof(self._memory))
        c = ctypes.CDLL(None, use_errno=True)  # releases the interpreter's lock while it waits
        self._timedwait = c.sem_timedwait
        # These never wait, so they keep it.
        self._post, self._trywait = ctypes.PyDLL(None).sem_post, ctypes.PyDLL(None).sem_trywait
        if new and c.sem_init(self._at, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init")

    def ring(self) -> None:
        self._post(self._at)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            until = time.time_ns() + int(1e9 * min(left, _LONGEST_S))
            if self._timedwait(self._at, ctypes.byref(_Timespec(*divmod(until, 10**9)))) == 0:
                while self._trywait(self._at) == 0:
                    pass
                return True
            if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(ctypes.get_errno(), "sem_timedwait")
        return False
