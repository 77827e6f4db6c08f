"""How V-Half and V-Min are made from their building blocks: repeat, reorder, squeeze.

A building block says at what time a microbatch does its four passes on each worker of a V: forward down, forward
up, I up, I down. Repeated every six slots (two stages' F, I and W) it fills every worker's time, and the lifetimes in
it are the memory. The ends of the repetition have holes; passes are moved forward into them where the memory
stays as it is, and the holes are squeezed out. Everything here is in slots of one action. Qi et al. 2024,
arXiv:2405.15362, section 4; the greedy choices are those of the authors' code (zbv_greedy.py), so orders are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dependency import Action, F, I, W

#: slots after which a worker's pattern repeats
_PERIOD = 6
#: the passes of a microbatch on a worker, in order of data flow; weights' gradients come after them
_F_DOWN, _F_UP, _I_UP, _I_DOWN, _WEIGHTS = range(5)
_PASSES = 4

#: times by pass and microbatch, of one worker
Times = list[list[int]]


def controllable_orders(block: Sequence[Sequence[int]], count: int) -> list[list[Action]]:
    """Return each worker's order for `count` microbatches of the building block `block[worker][pass]`."""
    times = [[[start + _PERIOD * m for m in range(count)] for start in passes] for passes in block]
    times = _squeeze(_reorder([_with_weights(t) for t in times]))
    moved = _reorder([t[:_PASSES] for t in times])
    times = _squeeze([_with_weights(t) for t in moved])
    return [_listed(worker, len(block), t[:_PASSES]) for worker, t in enumerate(times)]


def _slots(times: Times) -> list[int | None]:
    """Return which pass is in each slot of a worker, None where it is idle."""
    slots: list[int | None] = [None] * (max(t[-1] for t in times) + 1)
    for kind, starts in enumerate(times):
        for start in starts:
            slots[start] = kind
    return slots


def _with_weights(times: Times) -> Times:
    """Put W into idle slots, as early as there is one to do."""
    weights: list[int] = []
    waiting, end = 0, 0
    for end, kind in enumerate(_slots(times)):
        waiting += kind in (_I_UP, _I_DOWN)
        if kind is None and waiting:
            weights.append(end)
            waiting -= 1
    return [*times, [*weights, *range(end + 1, end + 1 + waiting)]]


def _listed(worker: int, depth: int, times: Times) -> list[Action]:
    """Return the worker's actions in order; of the W that wait, those of the up pass go first."""
    down, up = worker, 2 * depth - 1 - worker
    of_pass = {_F_DOWN: (F, down), _F_UP: (F, up), _I_UP: (I, up), _I_DOWN: (I, down)}
    done = dict.fromkeys((_F_DOWN, _F_UP, _I_UP, _I_DOWN, up, down), 0)
    waiting = {up: 0, down: 0}
    order: list[Action] = []

    def weight(stage: int) -> None:
        order.append(W(stage, done[-1 - stage]))
        done[-1 - stage] += 1
        waiting[stage] -= 1

    done |= {-1 - up: 0, -1 - down: 0}
    for kind in _slots(times):
        if kind is not None:
            what, stage = of_pass[kind]
            order.append(what(stage, done[kind]))
            done[kind] += 1
            waiting[stage] += what is I
        elif waiting[up] or waiting[down]:
            weight(up if waiting[up] else down)
    for stage in (up, down):
        while waiting[stage]:
            weight(stage)
    return order


def _by_time(times: Sequence[Times]) -> list[tuple[int, int, int, int]]:
    """Return (time, worker, pass, microbatch) of everything, in order."""
    return sorted(
        (start, worker, kind, m)
        for worker, own in enumerate(times)
        for kind, starts in enumerate(own)
        for m, start in enumerate(starts)
    )


def _before(times: Sequence[Times], worker: int, kind: int, m: int) -> int:
    """Return the latest time among what a pass needs, -1 if nothing."""
    latest = times[worker][kind][m - 1] if m else -1
    beside = {_F_DOWN: worker - 1, _I_UP: worker - 1, _F_UP: worker + 1, _I_DOWN: worker + 1}.get(kind, -1)
    if 0 <= beside < len(times):
        latest = max(latest, times[beside][kind][m])
    if 0 < kind < _PASSES:
        latest = max(latest, times[worker][kind - 1][m])
    return latest


def _squeeze(times: Sequence[Times]) -> list[Times]:
    """Run everything as early as data flow and each worker's order allow, in slots of equal length."""
    squeezed: list[Times] = [[[0] * len(starts) for starts in own] for own in times]
    free = [0] * len(times)
    for _, worker, kind, m in _by_time(times):
        start = max(free[worker], _before(squeezed, worker, kind, m) + 1)
        squeezed[worker][kind][m] = start
        free[worker] = start + 1
    return squeezed


def _reorder(times: Sequence[Times]) -> list[Times]:
    """Move passes into earlier holes where no worker then holds more than the most that one holds now.

    The steady state between the first I down on worker 0 and its last F stays; without W, so does what is before.
    """
    moved = [[list(starts) for starts in own] for own in times]
    with_weights = len(moved[0]) > _PASSES
    held = [_Held(own) for own in moved]
    allowed = max(max(h.after) for h in held)
    last = len(moved[0][_F_DOWN]) - 1
    filled: list[set[int]] = [set() for _ in moved]
    phase = 0
    for start, worker, kind, m in _by_time(moved):
        phase += phase == 0 and (kind, worker) == (_I_DOWN, 0)
        if phase == 2 or (phase == 0 and with_weights):
            earliest = _before(moved, worker, kind, m) + 1
            if kind == _WEIGHTS:
                earliest = max(earliest, sorted(moved[worker][_I_UP] + moved[worker][_I_DOWN])[m] + 1)
            for earlier in range(earliest, start):
                if earlier not in filled[worker] and held[worker].move(start, earlier, allowed):
                    moved[worker][kind][m] = start = earlier
                    break
        elif phase == 1 and kind == _F_DOWN and m == last:
            phase = 2
        filled[worker].add(start)
    return moved


class _Held:
    """What a worker holds after each slot. Without listed W, an idle slot does one that waits."""

    def __init__(self, times: Times) -> None:
        self._slots = _slots(times)
        self._idle_does_weights = len(times) == _PASSES
        self._state = [(0, 0)] * (len(self._slots) + 1)  # (held, I whose W waits) before each slot
        self._run(0, self._slots)

    @property
    def after(self) -> list[int]:
        return [held for held, _ in self._state]

    def _step(self, state: tuple[int, int], kind: int | None) -> tuple[int, int]:
        held, waiting = state
        if kind is None:
            does = self._idle_does_weights and waiting > 0
            return held - does, waiting - does
        return held + (kind <= _F_UP) - (kind == _WEIGHTS), waiting + (kind in (_I_UP, _I_DOWN))

    def _run(self, begin: int, slots: Sequence[int | None]) -> None:
        for slot in range(begin, len(slots)):
            self._state[slot + 1] = self._step(self._state[slot], slots[slot])

    def move(self, start: int, earlier: int, allowed: int) -> bool:
        """Move what is in slot `start` to the hole `earlier`, unless more than `allowed` would then be held."""
        kind, state = self._slots[start], self._state[earlier]
        for slot in range(earlier, len(self._slots)):
            now = kind if slot == earlier else None if slot == start else self._slots[slot]
            state = self._step(state, now)
            if state[0] > allowed:
                return False
            if slot > start and state == self._state[slot + 1]:
                break
        self._slots[earlier], self._slots[start] = kind, None
        self._run(earlier, self._slots)
        return True
