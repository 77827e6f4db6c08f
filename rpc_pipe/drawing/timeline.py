"""Draw what workers did, or will do: one line a worker, one cell a unit of time. Loads without torch.

What every picture shares stands here: the bubble. `draw` is the terminal's picture,
`svg` draws for documents and `page` for browsers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from ..dependency import Action
from ..planning.span import Span


def bubble(spans: Sequence[Span], num_workers: int) -> float:
    """Return the share of the workers' time, from the first start to the last end, in which nothing ran: 0 to 1."""
    if not spans:
        return 0.0
    first = min(span.start for span in spans)
    length = max(span.end for span in spans) - first
    busy = 0.0
    until = [first] * num_workers
    for span in sorted(spans, key=lambda s: s.start):
        # An exchange may overlap a computation; the worker is busy once.
        busy += max(0.0, span.end - max(span.start, until[span.worker]))
        until[span.worker] = max(until[span.worker], span.end)
    return 1 - busy / (num_workers * length) if length > 0 else 0.0


def held_stages(spans: Sequence[Span], num_workers: int) -> list[list[int]]:
    """Return the stages that each worker ran, ascending."""
    held: list[set[int]] = [set() for _ in range(num_workers)]
    for span in spans:
        held[span.worker].add(span.action.stage)
    return [sorted(stages) for stages in held]


def summarize(spans: Sequence[Span], num_workers: int, *, unit: str = "", num_stages: int | None = None) -> str:
    """Return workers, stages (where they differ from the workers), makespan and bubble in one line."""
    if not spans:
        return "nothing ran"
    if num_stages is None:
        num_stages = 1 + max(span.action.stage for span in spans)
    makespan = max(span.end for span in spans) - min(span.start for span in spans)
    parts = [f"{num_workers} worker{'s' * (num_workers != 1)}"]
    if num_stages != num_workers:
        parts.append(f"{num_stages} stage{'s' * (num_stages != 1)}")
    parts += [f"makespan {tell(makespan)} {unit}".rstrip(), f"bubble {bubble(spans, num_workers):.1%}"]
    return ", ".join(parts)


def tell(time: float) -> str:
    """Write a time with the digits that a reader uses, and without an exponent where it is large."""
    return f"{time:.6g}" if abs(time) < 1e6 else f"{time:.0f}"


def draw(spans: Sequence[Span], num_workers: int, *, width: int = 100) -> Text:
    """Draw spans as a coloured grid at most `width` columns wide.

    A cell shows kind and microbatch where they fit, else colour alone tells the kind; gaps are bubbles.
    """
    if not spans:
        return Text("nothing ran")
    first = min(span.start for span in spans)
    last = max(span.end for span in spans)
    label = len(f"worker {num_workers - 1} ")
    columns = max(10, width - label)
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    widest = max(len(_name(span.action)) for span in spans) + 1
    # One unit takes the columns its name needs, unless the picture would not fit.
    per_unit = min(widest / shortest, columns / max(last - first, 1e-12))
    if per_unit * shortest >= 1:
        per_unit = math.floor(per_unit * shortest) / shortest  # equal times get equal columns
    picture = Text()
    for worker in range(num_workers):
        picture.append(f"worker {worker} ".ljust(label), style="bold")
        at = 0
        for span in sorted((s for s in spans if s.worker == worker), key=lambda s: s.start):
            begin, end = round((span.start - first) * per_unit), round((span.end - first) * per_unit)
            if end <= max(begin, at):
                continue  # too short to be seen at this scale
            picture.append("·" * (begin - at), style="dim")
            cells = end - max(begin, at)
            picture.append(_fit(_name(span.action), cells), style=_style(span.action))
            at = end
        picture.append("·" * (round((last - first) * per_unit) - at), style="dim")
        picture.append("\n")
    picture.rstrip()
    return picture


def _style(action: Action) -> str:
    return f"{action.kind.ink} on {action.kind.colour}"


def _name(action: Action) -> str:
    return f"{action.kind.letter}{action.microbatch}"


def _fit(name: str, cells: int) -> str:
    """Shorten to the microbatch, whose kind the colour tells, and then to the kind alone."""
    if len(name) > cells:
        name = name[1:] if len(name) - 1 <= cells and name[0] != "U" else name[0]
    return name.ljust(cells)
