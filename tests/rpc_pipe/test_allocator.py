"""Memory that has been freed is not faulted in again."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rpc_pipe.system import allocator

#: in a process of its own: what is told to the allocator stays
_PROGRAM = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("allocator", sys.argv[1])
allocator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(allocator)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [bytearray(40_000_000) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

allocator.keep_freed_memory()
found = []
work = lambda: found.extend((faults(), faults()))
if sys.argv[2] == "thread":
    import threading
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
print(*found)
"""

#: aligned blocks as torch asks for them, between them what else is asked for; prints by how much the heap exceeds them
_BLOCKS = """
import ctypes, importlib.util, random, sys
spec = importlib.util.spec_from_file_location("allocator", sys.argv[1])
allocator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(allocator)
allocator.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
begin, size, draw = libc.sbrk(ctypes.c_long(0)), 8 << 20, random.Random(0)

def block():
    found = ctypes.c_void_p()
    libc.posix_memalign(ctypes.byref(found), ctypes.c_size_t(64), ctypes.c_size_t(size))
    return found

held = []
for step in range(400):
    held += [block() for _ in range(draw.randint(1, 4))]
    while len(held) > 8:
        libc.free(held.pop(draw.randrange(len(held))))
print((libc.sbrk(ctypes.c_long(0)) - begin) / (12 * size))
"""


def _faults(where="main", **environment):
    command = [sys.executable, "-c", _PROGRAM, str(Path(allocator.__file__)), where]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | environment
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=60)
    return [int(number) for number in ran.stdout.split()]


def test_freed_memory_is_kept_for_the_next_action():
    first, again = _faults()
    assert first > 1000 * max(1, again)


def test_what_the_user_told_the_allocator_stays():
    first, again = _faults(MALLOC_TRIM_THRESHOLD_="1000000")
    assert again > first / 2


def test_freed_memory_of_a_worker_that_is_a_thread_is_kept_too():
    """Heaps of threads went back to the system: payloads of 64 MiB cost a million page faults a step."""
    first, again = _faults("thread")
    assert first > 1000 * max(1, again)


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="only glibc is told")
def test_a_heap_is_not_larger_than_what_it_holds():
    """Ends of aligned blocks, kept for small ones, lay between free blocks: a heap grew to three times its content.

    Without them it is as large as that, or half as large again; with them two to three times as large.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    env |= allocator.variables(env)
    command = [sys.executable, "-c", _BLOCKS, str(Path(allocator.__file__))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=60)
    assert float(ran.stdout) < 1.9


def test_tunables_of_the_user_stay():
    assert allocator.variables({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}) == {}
    assert allocator.variables({"MALLOC_ARENA_MAX": "2"}) == {}
