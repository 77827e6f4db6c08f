"""Drawings for errors: the offending edge or cycle on a worker x time grid, in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .action import Action
from .spec import Spec

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
