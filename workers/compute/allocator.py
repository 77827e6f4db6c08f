"""Memory that actions free is kept for the next ones.

glibc gives large blocks, and the end of its heap, back to the system as soon as they are free, and each is faulted in
and cleared again page by page when the next action asks for one as large: a tenth of a step of a transformer on a CPU.
Threads have heaps of their own, of at most 64 MiB, which go back whole, whatever it is told; so they share one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

#: parameters of glibc's `mallopt`, and values that mean: never, none, and that of the main thread
_TRIM_THRESHOLD, _NEVER = -1, -1
_MMAP_MAX, _NONE = -4, 0
_ARENA_MAX, _MAIN = -8, 1


@cache
def keep_freed_memory() -> None:
    """Let this process keep what it frees: as much as it has needed at once, and no more.

    Holds for the threads that start after the first call, and for the main one. Does nothing where the user has told
    the allocator by a variable MALLOC_..., and without glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, _NONE)
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_ARENA_MAX, _MAIN)
