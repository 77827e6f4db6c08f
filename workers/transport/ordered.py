"""The order in which other processes see what this one stores in shared memory.

Python has no fence, but its locks are made of instructions that are one: what stands before a release is seen before
it, what stands behind an acquisition after it, and a release before an acquisition of the same lock that follows it.
"""

from __future__ import annotations

import platform
from threading import Lock

#: whether this processor lets others see stores in their order, and loads in theirs, but for a store before a load;
#: aarch64, and others, promise nothing of the kind
X86 = platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Let others see what has been stored before ahead of what is stored from here on; and so for what is loaded."""
    lock = Lock()  # of this call: nobody else is waited for
    lock.acquire()
    lock.release()
    lock.acquire()


def keep_order() -> None:
    """Do as `fence` where what comes before and behind is only stored, or only loaded."""
    if not X86:
        fence()
