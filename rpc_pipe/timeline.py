"""Draw what workers did, or will do: one line a worker, one cell a unit of time. Loads without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from .dependency import Action, Kind

#: colours by kind, told apart by colour-blind eyes too (Okabe and Ito 2008), with black text
_STYLES = {
    Kind.F: "black on #56b4e9",
    Kind.B: "black on #e69f00",
    Kind.I: "black on #f0e442",
    Kind.W: "black on #009e73",
    Kind.U: "black on #cc79a7",
}


class Span(NamedTuple):
    """One action of one worker, from `start` to `end`, in any unit of time."""

    worker: int
    action: Action
    start: float
    end: float


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
            picture.append(_fit(_name(span.action), cells), style=_STYLES[span.action.kind])
            at = end
        picture.append("·" * (round((last - first) * per_unit) - at), style="dim")
        picture.append("\n")
    picture.rstrip()
    return picture


def _name(action: Action) -> str:
    return f"{action.kind.value}{action.microbatch}"


def _fit(name: str, cells: int) -> str:
    """Shorten to the microbatch, whose kind the colour tells, and then to the kind alone."""
    if len(name) > cells:
        name = name[1:] if len(name) - 1 <= cells and name[0] != "U" else name[0]
    return name.ljust(cells)
