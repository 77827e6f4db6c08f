"""Drawings for errors: the offending edge or cycle on a worker x time grid, in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .action import Action
from .spec import Spec

_MAX_COLUMNS = 12
_MAX_ROWS = 10


def draw_edge(spec: Spec, need: Action, action: Action, rule: str) -> str:
    """Draw `need` and `action` on the nominal times around them, and under them the broken `rule`.

    Only slots are asked for, of the two workers involved: the drawing is as local as the check.
    """
    cells = {a: (spec.worker(a), spec.slot(a)) for a in (action, need)}
    first = min(slot for _, slot in cells.values())
    last = max(slot for _, slot in cells.values())
    columns = range(first, last + 1)
    shown = list(columns) if len(columns) <= _MAX_COLUMNS else [first, last]
    width = max(len(str(text)) for text in (*cells, first, last)) + 2
    lines = ["slot     " + "".join(str(slot).rjust(width) for slot in shown)]
    for row in sorted({row for row, _ in cells.values()}):
        names = {slot: f"[{name}]" for name, (at, slot) in cells.items() if at == row}
        lines.append(f"worker {row:<2}" + "".join(names.get(slot, ".").rjust(width) for slot in shown))
    lines.append(f"{action} waits for {need}{rule}")
    return "\n".join(lines)


def draw_cycle(spec: Spec, cycle: Sequence[Action]) -> str:
    """Draw a cycle: each action a column further to the right than the one it waits for."""
    shown = cycle[:_MAX_COLUMNS]
    width = max(len(str(action)) for action in shown) + 2
    workers = sorted({spec.worker(action) for action in shown})[:_MAX_ROWS]
    lines = []
    for row in workers:
        cells = (str(action) if spec.worker(action) == row else "." for action in shown)
        lines.append(f"worker {row:<2}" + "".join(cell.rjust(width) for cell in cells))
    more = "" if len(shown) == len(cycle) else f" ... {len(cycle) - len(shown)} more"
    lines.append(f"{cycle[0]} waits for {cycle[-1]}{more}: the circle closes")
    return "\n".join(lines)


def draw_listed(programs: Sequence[Sequence[Action]], action: Action, workers: Iterable[int]) -> str:
    """Draw the programs of `workers` around the places where they list `action`, or their beginnings."""
    lines = []
    for worker in sorted(set(workers) & set(range(len(programs)))):
        program = list(programs[worker])
        at = program.index(action) if action in program else 0
        first = max(0, at - _MAX_COLUMNS // 2)
        shown = program[first : first + _MAX_COLUMNS]
        cells = [f"[{a}]" if a == action else str(a) for a in shown]
        before, behind = ".. " * (first > 0), " .." * (first + len(shown) < len(program))
        lines.append(f"worker {worker}  {before}{' '.join(cells)}{behind}")
    return "\n".join(lines)


def draw_held(actions: Iterable[Action], allowed: int) -> str:
    """Draw how many microbatches a worker holds that runs `actions`, up to the first that is too many."""
    held, cells = 0, []
    for action in actions:
        held += action.kind.holds
        cells.append((str(action), str(held)))
        if held > allowed:
            break
    shown = cells[-_MAX_COLUMNS:]
    width = max((len(name) for name, _ in shown), default=0) + 2
    names = "".join(name.rjust(width) for name, _ in shown)
    counts = "".join(count.rjust(width) for _, count in shown)
    return f"runs  {names}\nholds {counts}\n{shown[-1][0]} is one too many: allowed are {allowed}"
