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

import re
from bisect import bisect, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, zip_longest

from ..dependency import F, I, Kind, W
from ._vee import Listing

#: slots after which a worker's pattern repeats
_PERIOD = 6
#: how many microbatches more than workers show two periods between the ends
_SHOWN = 4
#: the passes of a microbatch on a worker, in order of data flow; weights' gradients come after them
_F_DOWN, _F_UP, _I_UP, _I_DOWN, _WEIGHTS, _IDLE = range(6)
#: where the worker is that does the same pass before
_BESIDE = {_F_DOWN: -1, _F_UP: 1, _I_UP: -1, _I_DOWN: 1}

#: by worker, the time of each of a microbatch's passes
Block = tuple[tuple[int, int, int, int], ...]
#: the pass in each slot of a worker; the microbatch is the next of its pass
_Slots = bytes | bytearray


def timetable(block: Block, count: int, worker: int) -> Listing:
    """Return the timetable of a worker; waiting W of the up pass are first."""
    up = 2 * len(block) - 1 - worker
    of_pass = {_F_DOWN: (F, worker), _F_UP: (F, up), _I_UP: (I, up), _I_DOWN: (I, worker)}
    todo = Listing()

    def add(passes: bytes) -> Iterator[tuple[Kind, int] | None]:
        for each in passes:
            # An idle slot, too, does a W that waits.
            weights = next(((W, stage) for stage in (up, worker) if todo.waiting(stage)), None)
            listable = of_pass.get(each, weights)
            todo.add(listable)
            yield listable

    shown = min(count, len(block) + _SHOWN)
    short, begin = _repeating(block, shown)
    row = short[worker]
    middle = row[begin : begin + _PERIOD], count - shown
    for passes, times in [*_repeated(row[:begin]), middle, *_repeated(row[begin:])]:
        while times:
            before = todo.waiting(up), todo.waiting(worker)
            listed, times = [*add(passes)], times - 1
            if before == (todo.waiting(up), todo.waiting(worker)):
                todo.add(*listed, times=times)
                times = 0
    return todo


def _repeated(row: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield short parts of a row, and how often each stands there."""
    for found in re.finditer(rb"(.{1,24}?)\1+|.", row, re.DOTALL):
        part = found[1] or found[0]
        yield part, len(found[0]) // len(part)


def rows(block: Block, count: int) -> Iterator[bytes]:
    """Yield the passes in the slots of each worker for `count` microbatches."""
    shown = min(count, len(block) + _SHOWN)
    short, begin = _repeating(block, shown)
    for own in short:
        yield own[:begin] + own[begin : begin + _PERIOD] * (count - shown) + own[begin:]


@lru_cache(maxsize=2)
def _repeating(block: Block, count: int) -> tuple[list[bytes], int]:
    """Return the slots of all workers, and the slot where two periods begin that are alike; 0 if there are none."""
    made = _made(block, count)
    length = max(map(len, made))
    made = [row.ljust(length, bytes([_IDLE])) for row in made]
    starts = range(length - 2 * _PERIOD)
    return made, next((start for start in starts if all(_repeats(row, start) for row in made)), 0)


def _repeats(row: bytes, start: int) -> bool:
    period = row[start : start + _PERIOD]
    return _IDLE not in period and row.startswith(period, start + _PERIOD)


def _made(block: Block, count: int) -> list[bytes]:
    """Return the slots of each worker for `count` microbatches of the building block."""
    repeated = []
    for passes in block:
        own = bytearray([_IDLE]) * (max(passes) + _PERIOD * count)
        for each, start in enumerate(passes):
            own[start : start + _PERIOD * count : _PERIOD] = bytes([each]) * count
        repeated.append(_with_weights(own))
    filled = _squeeze(_reorder(repeated))
    idle = bytes.maketrans(bytes([_WEIGHTS]), bytes([_IDLE]))
    moved = _reorder([own.translate(idle) for own in filled])
    return [bytes(own) for own in _squeeze([_with_weights(own) for own in moved])]


def _with_weights(slots: _Slots) -> bytearray:
    """Put W into idle slots, as early as there is one to do, and behind the last."""
    filled, waiting = bytearray(slots), 0
    for slot, each in enumerate(slots):
        waiting += each in (_I_UP, _I_DOWN)
        if each == _IDLE and waiting:
            filled[slot] = _WEIGHTS
            waiting -= 1
    return filled + bytes([_WEIGHTS]) * waiting


class _Times:
    """The slot of each microbatch's pass, by worker and pass."""

    def __init__(self, num_workers: int) -> None:
        self.of: list[list[list[int]]] = [[[] for _ in range(_IDLE)] for _ in range(num_workers)]

    def before(self, worker: int, each: int, m: int) -> int:
        """Return the latest slot among the needs of a pass; -1 without any."""
        own = self.of[worker]
        latest = own[each][m - 1] if m else -1
        if each != _WEIGHTS:
            if each:
                latest = max(latest, own[each - 1][m])
            beside = worker + _BESIDE[each]
            if 0 <= beside < len(self.of):
                latest = max(latest, self.of[beside][each][m])
        return latest


def _passes(rows: Sequence[_Slots]) -> Iterator[tuple[int, int, int]]:
    """Yield (slot, worker, pass) in the order of slots."""
    for start, column in enumerate(zip_longest(*map(bytes, rows), fillvalue=_IDLE)):
        for worker, each in enumerate(column):
            if each != _IDLE:
                yield start, worker, each


def _squeeze(rows: Sequence[_Slots]) -> list[bytearray]:
    """Run everything as early as data flow and each worker's order allow, in slots of equal length."""
    squeezed = [bytearray() for _ in rows]
    times = _Times(len(rows))
    for _, worker, each in _passes(rows):
        own, done = squeezed[worker], times.of[worker][each]
        idle = times.before(worker, each, len(done)) + 1 - len(own)
        if idle > 0:
            own += bytes([_IDLE]) * idle
        done.append(len(own))
        own.append(each)
    return squeezed


class _HeldByForward:
    """The passes that a worker holds after each of its forwards so far; its slots list every W."""

    def __init__(self) -> None:
        self._forwards: list[int] = []
        self._held: list[int] = []
        self._weights: list[int] = []

    def too_many(self, slots: _Slots, begin: int, end: int, allowed: int) -> int | None:
        """Return a slot with more than `allowed` held if the pass at `end` moved to `begin`; None if there is none."""
        if slots[end] > _F_UP:
            return None
        at = bisect(self._forwards, begin)
        if max(self._held[at:], default=0) >= allowed:
            return max(slot for slot, held in zip(self._forwards[at:], self._held[at:], strict=True) if held >= allowed)
        return begin if at - bisect(self._weights, begin) >= allowed else None

    def note(self, slots: _Slots, begin: int, end: int) -> None:
        """Note that the pass at `end` has moved to `begin`."""
        at, held = bisect(self._forwards, begin), self._held
        if slots[begin] <= _F_UP:
            held[at:] = [at + 1 - bisect(self._weights, begin), *[each + 1 for each in held[at:]]]
            self._forwards.insert(at, begin)
        elif slots[begin] == _WEIGHTS:
            held[at:] = [each - 1 for each in held[at:]]
            insort(self._weights, begin)


class _HeldBySlot:
    """The passes that a worker holds after each of its slots; an idle slot does a W that waits."""

    def __init__(self, slots: _Slots) -> None:
        #: after each slot, how many W wait, and how much is held
        self._after: list[tuple[int, int]] = []
        self._after = self._changed = self._from(slots, 0, len(slots))

    def too_many(self, slots: bytearray, begin: int, end: int, allowed: int) -> int | None:
        """Return a slot with more than `allowed` held if the pass at `end` moved to `begin`; None if there is none."""
        slots[begin], slots[end] = slots[end], _IDLE
        self._changed = self._from(slots, begin, end)
        slots[begin], slots[end] = _IDLE, slots[begin]
        return next((begin + at for at, (_, held) in enumerate(self._changed) if held > allowed), None)

    def note(self, slots: _Slots, begin: int, end: int) -> None:
        """Note that the pass at `end` has moved to `begin`, as `too_many` was asked last."""
        if begin < end:
            self._after[begin : begin + len(self._changed)] = self._changed

    def _from(self, slots: _Slots, begin: int, end: int) -> list[tuple[int, int]]:
        """Return (waiting, held) after each slot from `begin` on, until both are as before behind `end`."""
        waiting, held = self._after[begin - 1] if begin else (0, 0)
        found: list[tuple[int, int]] = []
        for slot in range(begin, len(slots)):
            each = slots[slot]
            if each <= _F_UP:
                held += 1
            elif each != _IDLE:
                waiting += 1
            elif waiting:
                waiting, held = waiting - 1, held - 1
            if slot >= end and self._after[slot] == (waiting, held):
                break
            found.append((waiting, held))
        return found


def _most_held(slots: _Slots) -> int:
    """Return the most that a worker holds. Without listed W, an idle slot does one that waits."""
    full = slots if _WEIGHTS in slots else _with_weights(slots)
    return max(accumulate((each <= _F_UP) - (each == _WEIGHTS) for each in full))


def _reorder(rows: Sequence[bytearray]) -> list[bytearray]:
    """Move passes into earlier holes where no worker then holds more than the maximum of the given rows.

    The steady state between the first I down on worker 0 and its last F stays; without W, so do the passes before.
    """
    moved, listed = [bytearray(row) for row in rows], _WEIGHTS in rows[0]
    allowed, last = max(map(_most_held, rows)), rows[0].count(_F_DOWN)
    holding = [_HeldByForward() if listed else _HeldBySlot(row) for row in rows]
    times, done = _Times(len(rows)), [list[int]() for _ in rows]
    phase = 0
    for start, worker, each in _passes(rows):
        phase += phase == 0 and (each, worker) == (_I_DOWN, 0)
        mine, slots, hole = times.of[worker][each], moved[worker], -1
        if phase == 2 or (phase == 0 and listed):
            earliest = times.before(worker, each, len(mine)) + 1
            if each == _WEIGHTS:
                earliest = max(earliest, done[worker][len(mine)] + 1)
            hole = slots.find(_IDLE, earliest, start)
            while hole >= 0 and (wrong := holding[worker].too_many(slots, hole, start, allowed)) is not None:
                hole = slots.find(_IDLE, wrong + 1, start)  # an earlier hole has the same slot with too many
            if hole >= 0:
                slots[hole], slots[start] = each, _IDLE
        at = start if hole < 0 else hole
        holding[worker].note(slots, at, start)
        mine.append(at)
        if listed and each in (_I_UP, _I_DOWN):
            insort(done[worker], at)
        if phase == 1 and each == _F_DOWN and len(mine) == last:
            phase = 2
    return moved
