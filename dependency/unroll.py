"""The whole relation unrolled: for specs without a closed-form slot, and to name a cycle; and drawings for errors.

A global pass over every action of every worker (about 4 us and 0.4 kB each), so only where `slot` is
missing. Without a `program` the order is that of list scheduling at unit cost, backward before forward.
Drawings show the offending edge or cycle on a worker x time grid, in plain text.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from .action import Action
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


_MAX_COLUMNS = 12
_MAX_ROWS = 10


def _grid(rows: Mapping[str, Sequence[object]]) -> str:
    """Return rows of cells behind their names; brackets around a cell take none of its room."""
    width = max(len(str(cell).strip("[]")) for row in rows.values() for cell in row) + 2
    first = max(map(len, rows)) + 1
    return "\n".join(name.ljust(first) + "".join(str(cell).rjust(width) for cell in row) for name, row in rows.items())


def draw_edge(spec: Spec, need: Action, action: Action, rule: str) -> str:
    """Draw `need` and `action` on the nominal times around them, and under them the broken `rule`.

    Only slots are asked for, of the two workers involved: the drawing is as local as the check.
    """
    ends = {a: (spec.worker(a), spec.slot(a)) for a in (action, need)}
    first, *_, last = sorted(slot for _, slot in (ends[action], ends[need]))
    shown: Sequence[int] = range(first, last + 1)
    if len(shown) > _MAX_COLUMNS:
        shown = [first, last]
    rows: dict[str, Sequence[object]] = {"slot": shown}
    for worker in sorted({worker for worker, _ in ends.values()}):
        names = {slot: f"[{a}]" for a, (at, slot) in ends.items() if at == worker}
        rows[f"worker {worker}"] = [names.get(slot, ".") for slot in shown]
    return f"{_grid(rows)}\n{action} waits for {need}{rule}"


def draw_cycle(spec: Spec, cycle: Sequence[Action]) -> str:
    """Draw a cycle: each action a column further to the right than the one it waits for."""
    shown = cycle[:_MAX_COLUMNS]
    workers = sorted({spec.worker(action) for action in shown})[:_MAX_ROWS]
    rows = {f"worker {w}": [action if spec.worker(action) == w else "." for action in shown] for w in workers}
    more = "" if len(shown) == len(cycle) else f" ... {len(cycle) - len(shown)} more"
    return f"{_grid(rows)}\n{cycle[0]} waits for {cycle[-1]}{more}: the circle closes"


def draw_listed(programs: Mapping[int, Sequence[Action]], action: Action, workers: Iterable[int]) -> str:
    """Draw the programs of `workers` around the places where they list `action`, or their beginnings."""
    lines = []
    for worker in sorted(set(workers)):
        program = programs[worker]
        at = program.index(action) if action in program else 0
        first = max(0, at - _MAX_COLUMNS // 2)
        shown = program[first : first + _MAX_COLUMNS]
        cells = [f"[{a}]" if a == action else str(a) for a in shown]
        before, behind = ".. " * (first > 0), " .." * (first + len(shown) < len(program))
        lines.append(f"worker {worker}  {before}{' '.join(cells)}{behind}")
    return "\n".join(lines)


def draw_held(actions: Iterable[Action], allowed: int) -> str:
    """Draw how many microbatches a worker holds that runs `actions`, up to the first that is too many."""
    runs: list[Action] = []
    holds: list[int] = []
    for action in actions:
        runs.append(action)
        holds.append(sum(holds[-1:]) + action.kind.holds)
        if holds[-1] > allowed:
            break
    grid = _grid({"runs": runs[-_MAX_COLUMNS:], "holds": holds[-_MAX_COLUMNS:]})
    return f"{grid}\n{runs[-1]} is one too many: allowed are {allowed}"
