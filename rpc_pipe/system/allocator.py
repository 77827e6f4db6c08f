"""Memory that actions free is kept for the next ones.

glibc gives large blocks, and the end of its heap, back to the system as soon as they are free, and each is faulted in
and cleared again page by page when the next action asks for one as large: a tenth of a step of a transformer on a CPU.
Each thread has a heap of at most 64 MiB, which goes back whole under any settings; so threads share one heap.

torch asks for aligned blocks, and glibc cuts off their ends. The ends stay in its caches of small blocks, and up to
glibc 2.37 a free block between two of them does not fit the next request of its size: the heap of a worker that passes
on payloads of 64 MiB became three times as large as its contents. Without these caches ends go back to the block.
"""

import ctypes
import os
from collections.abc import Mapping
from functools import cache

#: parameters of glibc's `mallopt`, and values that mean: never, none, and that of the main thread
_MOST_CACHED = 1
_TRIM_THRESHOLD, _NEVER = -1, -1
_MMAP_MAX, _NONE = -4, 0
_ARENA_MAX, _MAIN = -8, 1
#: the setting that only the environment of a new process can make: no caches of threads
_TUNABLES, _NO_CACHES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process which calls `keep_freed_memory` needs besides `environ`."""
    return {} if _TUNABLES in environ or _is_told(environ) else {_TUNABLES: _NO_CACHES}


@cache
def keep_freed_memory() -> None:
    """Let this process keep freed memory, up to its peak.

    Holds for the main thread and for the threads that start after the first call. Does nothing where the user has set
    a variable MALLOC_....
    """
    if _is_told(os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_MAX, _NONE)
    mallopt(_TRIM_THRESHOLD, _NEVER)
    mallopt(_ARENA_MAX, _MAIN)
    mallopt(_MOST_CACHED, _NONE)


def _is_told(environ: Mapping[str, str]) -> bool:
    """Return whether the user has set a variable of the allocator."""
    tunables = environ.get(_TUNABLES, "").replace(_NO_CACHES, "")
    return "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environ)
