"""Memory that has been freed is not faulted in again."""

import os
import subprocess
import sys
from pathlib import Path

from rpc_pipe.workers.compute import allocator

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
