"""Waits of threads: for an arrival, of which threads and processes notify them by pipes; or with a deadline."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_LONGEST_MS = 2**31 - 1
#: most notifications that are taken at once; memory for more would have to be found each time
_NOTICES = 64


class Wakeup:
    """A pipe. Notifications without a waiting thread are not lost, but may count as one.

    A POSIX semaphore in shared memory was no faster: 8 workers on 2 cores, 2/4 ms a stage, 166 ms a step against 165.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        _close_with(self, self._read)
        self._notifier = Notifier(write)
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    @property
    def descriptor(self) -> int:
        """The descriptor in this process, for `Notifier.of`."""
        return self._notifier.descriptor

    def notify(self) -> None:
        """Wake the waiting thread; if none waits, the next wait returns at once."""
        self._notifier.notify()

    def watch(self, descriptor: int) -> None:
        """Wake also whenever `descriptor` can be read."""
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until notified since the last wait; return False on timeout. May wake for nothing."""
        readable = self._poll.poll(min(1000 * timeout_s, _LONGEST_MS))
        for descriptor, _ in readable:
            if descriptor == self._read:
                os.read(descriptor, _NOTICES)
        return bool(readable)


class Notifier:
    """The end of a wakeup that notifies.

    Args:
        descriptor: of the pipe's end, which does not block; closed when this is forgotten.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        _close_with(self, descriptor)

    @classmethod
    def of(cls, process: int, descriptor: int) -> Notifier:
        """Return the notifier of a wakeup of another process of the same user.

        Raises:
            OSError: there is none.
        """
        return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    def notify(self) -> None:
        """Wake the waiting thread; if none waits, the next wait returns at once. Without a thread, do nothing."""
        try:
            os.write(self.descriptor, b"\0")
        except (BlockingIOError, BrokenPipeError):  # it is full; its owner is gone
            pass


def _close_with(owner: object, descriptor: int) -> None:
    """Close a descriptor when its owner is gone, and never before: at the interpreter's end threads still notify, and
    where its number had been used again they would write a byte into another file."""
    weakref.finalize(owner, os.close, descriptor).atexit = False


T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return the result of a call on a new thread, which is abandoned if the call does not return in time.

    Raises:
        TimeoutError: it did not.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    if wait([done], timeout_s).not_done:
        raise TimeoutError("no answer")
    return done.result()
