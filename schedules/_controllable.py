"""How V-Half and V-Min are made from their building blocks: repeat, reorder, squeeze.

A building block says at what time a microbatch does its four passes on each worker of a V: forward down, forward
up, I up, I down. Repeated every six slots (two stages' F, I and W) it fills every worker's time, and the lifetimes in
it are the memory. The ends of the repetition have holes; passes are moved forward into them where the memory
stays as it is, and the holes are squeezed out. Everything here is in slots of one action. Qi et al. 2024,
arXiv:2405.15362, section 4; the greedy choices are those of the authors' code (zbv_greedy.py), so orders are
equal.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest

from ..dependency import Action, F, I
from ._vee import Listing

#: slots after which a worker's pattern repeats
_PERIOD = 6
#: the passes of a microbatch on a worker, in order of data flow; weights' gradients come after them
_F_DOWN, _F_UP, _I_UP, _I_DOWN, _WEIGHTS = range(5)
#: where the worker is that does the same pass before
_BESIDE = {_F_DOWN: -1, _F_UP: 1, _I_UP: -1, _I_DOWN: 1}

#: which pass is in each slot of a worker, None where it is idle; the microbatch is the next of its pass
Slots = Sequence[int | None]


def controllable_orders(block: Sequence[Sequence[int]], count: int) -> list[list[Action]]:
    """Return each worker's order for `count` microbatches of the building block `block[worker][pass]`."""
    repeated: list[Slots] = []
    for passes in block:
        own: list[int | None] = [None] * (max(passes) + _PERIOD * count)
        for kind, start in enumerate(passes):
            own[start : start + _PERIOD * count : _PERIOD] = [kind] * count
        repeated.append(own)
    filled = _squeeze(_reorder([_with_weights(own) for own in repeated]))
    moved = _reorder([[None if kind == _WEIGHTS else kind for kind in own] for own in filled])
    squeezed = _squeeze([_with_weights(own) for own in moved])
    return [_listed(own, worker, 2 * len(block) - 1 - worker) for worker, own in enumerate(squeezed)]


def _with_weights(slots: Slots) -> Slots:
    """Put W into idle slots, as early as there is one to do, and behind the last."""
    filled: list[int | None] = []
    waiting = 0
    for kind in slots:
        waiting += kind in (_I_UP, _I_DOWN)
        filled.append(_WEIGHTS if kind is None and waiting else kind)
        waiting -= filled[-1] == _WEIGHTS
    return filled + [_WEIGHTS] * waiting


def _listed(slots: Slots, down: int, up: int) -> list[Action]:
    """Return a worker's actions in order; of the waiting W, the up pass's go first."""
    of_pass = {_F_DOWN: (F, down), _F_UP: (F, up), _I_UP: (I, up), _I_DOWN: (I, down)}
    todo = Listing()
    for kind in slots:
        if kind in of_pass:
            todo.add(of_pass[kind])
        else:
            todo.add(*todo.waiting(up, down)[:1])
    return todo.actions


def _passes(slots: Sequence[Slots]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (time, worker, pass, microbatch) of everything, in order."""
    count: Counter[tuple[int, int]] = Counter()
    for start, kinds in enumerate(zip_longest(*slots)):
        for worker, kind in enumerate(kinds):
            if kind is not None:
                yield start, worker, kind, count[worker, kind]
                count[worker, kind] += 1


def _before(times: Mapping[tuple[int, int, int], int], worker: int, kind: int, m: int) -> int:
    """Return the latest time, by worker, pass and microbatch, among the needs of a pass, -1 without any."""
    needs = [(worker, kind, m - 1)]
    if kind in _BESIDE:
        needs += [(worker + _BESIDE[kind], kind, m), (worker, kind - 1, m)]
    return max(times.get(need, -1) for need in needs)


def _squeeze(slots: Sequence[Slots]) -> list[Slots]:
    """Run everything as early as data flow and each worker's order allow, in slots of equal length."""
    squeezed: list[list[int | None]] = [[] for _ in slots]
    times: dict[tuple[int, int, int], int] = {}
    for _, worker, kind, m in _passes(slots):
        own = squeezed[worker]
        own += [None] * (_before(times, worker, kind, m) + 1 - len(own))
        times[worker, kind, m] = len(own)
        own.append(kind)
    return [*squeezed]


def _most_held(slots: Slots) -> int:
    """Return the most that a worker holds. Without listed W, an idle slot does one that waits."""
    full = slots if _WEIGHTS in slots else _with_weights(slots)
    return max(accumulate((kind in (_F_DOWN, _F_UP)) - (kind == _WEIGHTS) for kind in full))


def _reorder(slots: Sequence[Slots]) -> list[Slots]:
    """Move passes into earlier holes where no worker then holds more than today's maximum.

    The steady state between the first I down on worker 0 and its last F stays; without W, so do the passes before.
    """
    moved = [*slots]
    times = {(worker, kind, m): start for start, worker, kind, m in _passes(slots)}
    allowed = max(map(_most_held, slots))
    phase, last = 0, slots[0].count(_F_DOWN) - 1
    for start, worker, kind, m in _passes(slots):
        phase += phase == 0 and (kind, worker) == (_I_DOWN, 0)
        if phase == 2 or (phase == 0 and _WEIGHTS in slots[0]):
            earliest = _before(times, worker, kind, m) + 1
            if kind == _WEIGHTS:
                done = [at for at, other in enumerate(moved[worker]) if other in (_I_UP, _I_DOWN)]
                earliest = max(earliest, done[m] + 1)
            for earlier in range(earliest, start):
                if moved[worker][earlier] is None:
                    changed = list(moved[worker])
                    changed[earlier], changed[start] = kind, None
                    if _most_held(changed) <= allowed:
                        moved[worker], times[worker, kind, m] = changed, earlier
                        break
        elif phase == 1 and kind == _F_DOWN and m == last:
            phase = 2
    return moved
