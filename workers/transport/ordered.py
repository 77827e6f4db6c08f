"""The order in which other processes see what this one stores in shared memory.

An x86 processor lets others see stores in their order; aarch64, and others, do not promise that. Python has no fence,
but its locks are made of instructions that are one: what stands before a release is seen before it, what stands behind
an acquisition after it, and a release before an acquisition of the same lock that follows it.
"""

from __future__ import annotations

from threading import Lock


def fence() -> None:
    """Let others see what has been stored before ahead of what is stored from here on; and so for what is loaded."""
    lock = Lock()  # of this call: nobody else is waited for
    lock.acquire()
    lock.release()
    lock.acquire()
