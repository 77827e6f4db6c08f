"""Unroll the whole relation: for specs without a closed-form slot, and to name a cycle.

A global pass over every action of every worker (about 4 us and 0.4 kB each), so only where `slot` is
missing. Without a `program` the order is that of list scheduling at unit cost, backward before forward.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter

from .action import Action
from .draw import draw_cycle, draw_listed
from .errors import ScheduleError
from .spec import Spec


def unroll(spec: Spec) -> list[list[Action]]:
    """Return each worker's actions in the order of a greedy run, with one unit of time each.

    Raises:
        ScheduleError: the relation has a cycle, which is drawn.
    """
    workers = range(max(spec.workers) + 1)
    sorter = _sorted(spec, {action: spec.needs(action) for worker in workers for action in spec.own_actions(worker)})
    order: list[list[Action]] = [[] for _ in workers]
    ready: list[list[tuple[bool, int, int, str, Action]]] = [[] for _ in workers]
    while sorter.is_active():
        for action in sorter.get_ready():
            key = (action.kind.way == 1, action.index, -action.stage, action.kind.letter, action)
            heapq.heappush(ready[spec.worker(action)], key)
        for own, queue in zip(order, ready, strict=True):
            if queue:
                own.append(heapq.heappop(queue)[-1])
                sorter.done(own[-1])
    return order


def check_acyclic(spec: Spec, programs: list[list[Action]]) -> None:
    """Check that listed programs can run in their order.

    Raises:
        ScheduleError: the relation and the programs together have a cycle, which is drawn.
    """
    needs = {action: spec.needs(action) for program in programs for action in program}
    for program in programs:
        for before, action in itertools.pairwise(program):
            needs[action].append(before)
    _sorted(spec, needs)


def _sorted(spec: Spec, needs: dict[Action, list[Action]]) -> TopologicalSorter[Action]:
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle: list[Action] = error.args[1]
        text = " -> ".join(map(str, cycle))
        drawing = draw_cycle(spec, cycle[:-1])
        given = "".join(f"; {name}={value}" for name, value in spec.parameters().items())
        raise ScheduleError(f"cycle: {text} (each waits for the one before it{given})", drawing) from None
    return sorter


def check_listed_once(
    spec: Spec, programs: Mapping[int, list[Action]], worker: int, why_not_run: Callable[[Spec, Action], str]
) -> None:
    """Check that a worker's program lists each of its actions once.

    Args:
        why_not_run: returns why an action is none that a schedule may name; "": it is one.

    Raises:
        ScheduleError: it does not.
    """
    missing = dict.fromkeys(spec.own_actions(worker))
    for action in programs[worker]:
        wrong, at = why_not_run(spec, action), worker
        if not wrong and (at := spec.worker(action)) != worker:
            wrong = f", which is placed on worker {at}: an action is run by exactly one worker"
        elif not wrong and action not in missing:
            wrong = " twice"
        if wrong:
            drawing = draw_listed(programs, action, {worker, at})
            raise ScheduleError(f"program({worker}) lists {action}{wrong}", drawing)
        del missing[action]
    for action in missing:
        raise ScheduleError(f"program({worker}) does not list {action}", draw_listed(programs, action, {worker}))
