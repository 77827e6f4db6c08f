"""How V-Half and V-Min are made from their building blocks: repeat, reorder, squeeze.

A building block lists the times of a microbatch's four passes on each worker of a V: forward down, forward up,
I up, I down. Repeated every six slots (two stages' F, I and W) it fills every worker's time, and the lifetimes in
it are the memory. The ends of the repetition have holes; passes are moved forward into them where the memory
stays as it is, and the holes are squeezed out. Everything here is in slots of one action. Qi et al. 2024,
arXiv:2405.15362, section 4; the greedy choices and so the orders equal the authors' code (zbv_greedy.py).

Between its ends a timetable repeats a period, and the ends are the same for any number of microbatches. So a timetable
of few microbatches is made, with two equal periods on all workers. A period follows from the period before it, so any
number of periods may stand there. The checker proves the longer timetable slot by slot.
"""

from bisect import insort
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..dependency import F, I, W
from ._reordering import F_DOWN, F_UP, I_DOWN, I_UP, IDLE, WEIGHTS, Array, Times, reordered, squeezed, waiting
from ._vee import EqualSteps, Listing

#: slots after which a worker's pattern repeats
_PERIOD = 6
#: how many microbatches more than workers show two periods between the ends
_SHOWN = 4
#: by worker, the time of each of a microbatch's passes
Block = tuple[tuple[int, int, int, int], ...]


def timetable(block: Block, count: int, worker: int) -> Listing:
    """Return the timetable of a worker; waiting W of the up pass are first."""
    up, more, todo = 2 * len(block) - 1 - worker, max(0, count - len(block) - _SHOWN), Listing()
    short, begin = _repeating(block, count - more)
    row = np.frombuffer(short[worker], np.uint8)
    # Within so many periods the waiting W of the up pass are done; then each period does the same as the one before.
    settled = min(more, 1 + int(waiting(row == I_UP, row >= WEIGHTS)[begin]))
    row = np.concatenate([row[:begin], np.tile(row[begin : begin + _PERIOD], settled), row[begin:]])
    middle, more, free = begin + settled * _PERIOD, more - settled, row >= WEIGHTS
    listed = [(F, worker, row == F_DOWN), (F, up, row == F_UP), (I, up, row == I_UP), (I, worker, row == I_DOWN)]
    for _, stage, inputs in listed[2:]:
        # An idle slot, too, does a W that waits.
        done = np.cumsum(inputs) - waiting(inputs, free)
        listed.append((W, stage, np.diff(done, prepend=0) > 0))
        free &= ~listed[-1][2]
    for kind, stage, here in listed:
        slots = np.flatnonzero(here)
        at = int(np.searchsorted(slots, middle)) if more else len(slots)
        runs = [*_runs(slots[:at], 0), *_runs(slots[at:] + more * _PERIOD, at + more)]
        if more:
            insort(runs, EqualSteps(at, more, int(slots[at]), _PERIOD))
        for run in runs:
            todo.run(kind, stage, run)
    return todo


def _runs(slots: Array, first: int) -> Iterator[EqualSteps]:
    """Yield the slots of microbatches from `first` on in as few runs as possible."""
    apart, begin, last = np.diff(slots), 0, len(slots) - 1
    for end in [*(np.flatnonzero(apart[1:] != apart[:-1]) + 1).tolist(), last]:
        if begin < end or begin == last:
            growth = int(apart[begin]) if begin < end else 0
            yield EqualSteps(first + begin, end + 1 - begin, int(slots[begin]), growth)
            begin = end + 1


@lru_cache(maxsize=2)
def _repeating(block: Block, count: int) -> tuple[list[bytes], int]:
    """Return the slots of all workers, and the slot where two periods begin that are alike; 0 if there are none."""
    made = _made(block, count)
    length = max(map(len, made))
    made = [row.ljust(length, bytes([IDLE])) for row in made]
    slots = np.frombuffer(b"".join(made), np.uint8).reshape(-1, length)
    alike = (slots[:, :-_PERIOD] == slots[:, _PERIOD:]).all(0) & (slots != IDLE).all(0)[:-_PERIOD]
    starts = max(0, length - 2 * _PERIOD)
    found = np.flatnonzero(np.all([alike[k : k + starts] for k in range(_PERIOD)], 0))
    return made, int(found[0]) if len(found) else 0


def _made(block: Block, count: int) -> list[bytes]:
    """Return the slots of each worker for `count` microbatches of the building block."""
    times = Times(len(block), count)
    for worker, passes in enumerate(block, 1):
        for each, start in enumerate(passes):
            times.of[each, worker, 1 : count + 1] = np.arange(start, start + _PERIOD * count, _PERIOD)
    times = squeezed(reordered(times, listed=True))
    times = reordered(times, listed=False)
    times.with_weights()
    return [row.tobytes().rstrip(bytes([IDLE])) for row in squeezed(times).rows(IDLE)]
