"""Timelines for the terminal: one line a worker, one cell a unit of time. Loads without torch.

The bubble, which every picture shows, stands here. `draw` is the terminal's picture,
`svg` draws for documents and `page` for browsers.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from ..dependency import Action, Spec
from ..planning.span import Span


def bubble(spans: Sequence[Span], num_workers: int) -> float:
    """Return the idle share, 0 to 1, of the workers' time from the first start to the last end."""
    shares = idle(spans, num_workers)
    return sum(shares) / num_workers if shares else 0.0


def idle(spans: Sequence[Span], num_workers: int) -> list[float]:
    """Return `bubble` of each worker; [] if no time passed."""
    first = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=0.0) - first
    busy, until = [0.0] * num_workers, [first] * num_workers
    for span in sorted(spans, key=lambda s: s.start):
        # A transfer may overlap a computation; the worker counts as busy once.
        busy[span.worker] += max(0.0, span.end - max(span.start, until[span.worker]))
        until[span.worker] = max(until[span.worker], span.end)
    return [1 - each / length for each in busy] if length > 0 else []


def held_stages(spans: Sequence[Span], num_workers: int) -> list[list[int]]:
    """Return the stages that each worker ran, ascending."""
    held: list[set[int]] = [set() for _ in range(num_workers)]
    for span in spans:
        held[span.worker].add(span.action.stage)
    return [sorted(stages) for stages in held]


def summarize(
    spans: Sequence[Span], num_workers: int, *, unit: str = "", num_stages: int | None = None, gaps: str = "bubble"
) -> str:
    """Return workers, stages (where they differ from the workers), makespan and `gaps` in one line.

    A schedule's idle time is its bubble; a measured run may be idle for other causes.
    """
    if not spans:
        return "nothing ran"
    num_stages = num_stages or 1 + max(span.action.stage for span in spans)
    makespan = max(span.end for span in spans) - min(span.start for span in spans)
    parts = [f"{num_workers} worker{'s' * (num_workers != 1)}"]
    if num_stages != num_workers:
        parts.append(f"{num_stages} stage{'s' * (num_stages != 1)}")
    length = f"{makespan:.4g} {unit}" if unit else tell(makespan)
    parts += [f"makespan {length}", f"{gaps} {bubble(spans, num_workers):.1%}"]
    return ", ".join(parts)


def row_names(hosted: Mapping[int, Sequence[tuple[int, int]]], num_routes: int = 1, replicas: int = 1) -> list[str]:
    """Return the name of each worker's row, such as `worker 1: stage 0, replica 1`.

    Args:
        hosted: the (stage, route) of each worker.
        num_routes: of all replicas.
    """
    names = []
    for worker, own in hosted.items():
        stages = sorted({stage for stage, _ in own})
        held = f": stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if own else ""
        which = f", replica {own[0][1] * replicas // num_routes}" if own and replicas > 1 else ""
        names.append(f"worker {worker}{held}{which}")
    return names


def tell(time: float) -> str:
    """Write a time with the digits that a reader uses, and without an exponent where it is large."""
    return f"{time:.6g}" if abs(time) < 1e6 else f"{time:.0f}"


def index_text(spec: Spec | None, action: Action) -> str:
    """Return the index of an action as text; without a spec sequences are whole."""
    return str(action.index) if spec is None else spec.index_text(action)


def draw(
    spans: Sequence[Span],
    num_workers: int,
    *,
    width: int = 100,
    most_lines: int = 0,
    spec: Spec | None = None,
    numbers: Sequence[int] = (),
) -> Text:
    """Draw spans as a coloured grid at most `width` columns wide.

    A cell shows kind and microbatch, before them the stage where a worker has several, if they fit; else colour alone
    shows the kind, and an underline a later stage of the worker. Gaps are bubbles. Names that do not fit side by side
    are drawn in several rows of time, one below the other; if these are more than `most_lines` lines, the first and the
    last, with a mark between. A legend below explains cells that are too small for names. Slices are named as `spec`
    does; `numbers` are the workers' numbers if they are not from 0.
    """
    if not spans:
        return Text("nothing ran")
    held = held_stages(spans, num_workers)
    several = any(len(stages) > 1 for stages in held)
    names = {a: f"{a.stage if several else ''}{a.kind.letter}{index_text(spec, a)}" for _, a, *_ in spans}
    longest, label = max(map(len, names.values())), len(f"worker {num_workers - 1} ")
    # One column parts names; if none is left for that, the digits of the next name must not touch.
    scale, rows = _scale(spans, max(10, width - label), longest + several, longest + 1, most_lines // (num_workers + 1))
    picture = Text()
    until = rows[0][0]
    for first, last in rows:
        if first > until:
            picture.append(f"⋯ {tell(until)} to {tell(first)} is left out\n", style="dim")
        until = last
        if len(rows) > 1:
            picture.append(f"{tell(first)} to {tell(last)}\n", style="dim")
        shown = [span for span in spans if span.end > first and span.start < last]
        for worker in range(num_workers):
            own = [span for span in shown if span.worker == worker]
            picture.append(f"worker {numbers[worker] if numbers else worker} ".ljust(label), style="bold")
            picture.append_text(_line(own, names, held[worker], first, last, scale))
            picture.append("\n")
    if most_lines and len(rows) == 1 and scale * shortest_of(spans) < longest + several:
        picture.append("cells are too small for names: a wider terminal, --svg or --html shows them", style="dim")
    picture.rstrip()
    return picture


def shortest_of(spans: Sequence[Span]) -> float:
    """Return the time of the shortest span that takes some; 1.0 if none does."""
    return min((span.end - span.start for span in spans if span.end > span.start), default=1.0)


def _scale(
    spans: Sequence[Span], columns: int, least: int, usual: int, most_rows: int
) -> tuple[float, list[tuple[float, float]]]:
    """Return the columns of a unit of time, and (from, to) of each row: one, unless names fit into several only.

    Args:
        least, usual: columns that the shortest action needs, and takes if there is room.
        most_rows: of more rows the first and the last are drawn.
    """
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    shortest = shortest_of(spans)
    cell = min(usual, columns * shortest / max(last - first, 1e-12))
    cell = math.floor(cell) if cell >= 1 else cell  # equal times get equal columns
    units = math.ceil((last - first) / shortest * (1 - 1e-9))
    count = math.ceil(units / max(1, columns // usual))
    if cell >= least or min(count, most_rows) < 2:
        return cell / shortest, [(first, last)]
    row = math.ceil(units / count) * shortest
    rows = list(pairwise([*(first + i * row for i in range(count)), last]))
    return usual / shortest, rows if count <= most_rows else rows[: -(-most_rows // 2)] + rows[-(most_rows // 2) :]


def _line(
    own: Sequence[Span], names: Mapping[Action, str], held: Sequence[int], first: float, last: float, scale: float
) -> Text:
    """Draw the actions of a worker, which holds the stages `held`, from `first` to `last`."""
    line, at = Text(), 0
    for span in sorted(own, key=lambda s: s.start):
        begin = max(at, round((max(span.start, first) - first) * scale))
        end = round((min(span.end, last) - first) * scale)
        if end <= begin:
            continue  # too short to be seen at this scale
        line.append("·" * (begin - at), style="dim")
        name = names[span.action] if span.start >= first else "…"  # goes on from the row before
        line.append(_fit(name, end - begin), style=_style(span.action, held.index(span.action.stage)))
        at = end
    return line.append("·" * (round((last - first) * scale) - at), style="dim")


def _style(action: Action, level: int) -> str:
    return f"{'underline ' if level else ''}{action.kind.ink} on {action.kind.colour}"


def _fit(name: str, cells: int) -> str:
    """Shorten a name to kind and microbatch, to the microbatch (its colour shows the kind), or to the kind."""
    plain = name.lstrip("0123456789")  # without the stage
    letter, number = plain[:1], plain[1:]
    shorter = (name, plain, letter if letter == "U" else number, letter)
    return next((text for text in shorter if len(text) <= cells), letter).ljust(cells)
