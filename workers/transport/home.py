"""On which processor a worker's compute thread wakes up.

Linux may wake a thread where the one runs that wakes it, as if that were about to sleep. Between workers it is not:
it has to note what it has done and to look what is next, and the neighbour waits for that while other processors are
idle. Measured on a virtual machine, 8 workers on 2 processors, 2/4 ms a stage: 161 ms a step with homes, 178 without.
How much it is elsewhere depends on how the system chooses processors.

A worker that waits is therefore bound to its home, another one than its neighbours', until it is awake; then it may
run anywhere. Where processors are busy, with this job's compute or another's, a fixed place to wake up is worse than
none (by 7 to 16 % for 3 and 4 workers that compute on 2 processors), so they have to be idle a third of the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: how often to look how busy the processors are; the system counts in 10 ms
_LOOK_EVERY_S = 0.1
#: how much of their time they must be idle
_IDLE = 1 / 3
#: from so many processors for each worker on, the system is left to find an idle one
_PLENTY = 2


class Home:
    """A processor to wake up on, used while this process's processors have time to spare.

    Args:
        processor: its number.
        idle_s: for how long these processors have been idle in all.
    """

    def __init__(self, processor: int, num_processors: int, idle_s: Callable[[], float] | None = None) -> None:
        self._processor = processor
        self._only = {processor}
        self._num_processors = num_processors
        self._idle_s = idle_s or _idle_s
        self._looked = time.monotonic(), self._idle_s()
        self._spare = False

    def enter(self) -> set[int]:
        """Bind the calling thread, if that pays now; return where it may run otherwise, for `leave`, or nothing."""
        if time.monotonic() >= self._looked[0] + _LOOK_EVERY_S:
            self._look()
        if not self._spare:
            return set()
        allowed = os.sched_getaffinity(0)
        if self._processor not in allowed:
            return set()
        try:
            os.sched_setaffinity(0, self._only)
        except OSError:  # a sandbox forbids it, or the processors have changed
            return set()
        return allowed

    def leave(self, allowed: set[int]) -> None:
        """Let the calling thread run where it might before it was bound, unless others have moved it meanwhile."""
        if os.sched_getaffinity(0) == self._only:
            os.sched_setaffinity(0, allowed)

    def _look(self) -> None:
        before, idle_before = self._looked
        self._looked = now, idle = time.monotonic(), self._idle_s()
        self._spare = idle - idle_before > _IDLE * self._num_processors * (now - before)


def home_of(worker: int, local_workers: int) -> Home | None:
    """Return the home of a worker, one of so many on this host; None: the system does better."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    processors = sorted(os.sched_getaffinity(0))
    if not 1 < len(processors) < _PLENTY * local_workers:
        return None
    with suppress(OSError):
        return Home(processors[worker % len(processors)], len(processors))
    return None


def _idle_s() -> float:
    """Return for how long the processors of this process have been idle since the system started."""
    wanted = {f"cpu{processor}" for processor in os.sched_getaffinity(0)}
    idle = 0
    for line in Path("/proc/stat").read_text().splitlines():  # proc_stat(5): name, user, nice, system, idle, ...
        fields = line.split(maxsplit=5)
        if fields[0] in wanted:
            idle += int(fields[4])
    return idle / os.sysconf("SC_CLK_TCK")
