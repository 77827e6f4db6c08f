"""The page of a run or a schedule, for browsers: live as `rpc-pipe watch` serves it, or one file that holds all.

The pictures are the SVG of `svg`; the page's script makes the rest from a run's state as JSON.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import accumulate, chain, repeat
from typing import Any

from .svg import Picture, draw_svg
from .timeline import idle

#: number of causes of a worker's waits that are named, the longest first
_MOST_CAUSES = 3
#: the one definition of the gaps' share on all pages
_GAPS = "{}: share of the time, from the first start to the last end, in which a worker runs no action"


def draw_page(pictures: Sequence[Picture], state: Mapping[str, Any] | None = None) -> str:
    """Return a self-contained HTML page with the pictures one above the other, on one axis of time.

    Args:
        state: of a run that has ended, as the live page gets it; None: there is no run.

    Raises:
        ValueError: a time is not a finite number.
    """
    # In a script element only `<` can end the element or begin a comment; JSON may write it as an escape.
    data = json.dumps(state or {}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = ", ".join(picture.name for picture in pictures) or "rpc-pipe"
    return fill_page(TITLE=escape(title), PICTURES=sections(pictures), DATA=data)


def fill_page(**parts: str) -> str:
    """Return the page with its parts; without DATA it asks for the state of a run."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda found: parts.get(found[1], ""), template)


def sections(pictures: Sequence[Picture]) -> str:
    """Return the pictures for the page, with notes, and a row of figures for each worker."""
    longest: dict[str, float] = defaultdict(float)
    for each in (each for each in pictures if each.spans and len(pictures) > 1):
        took = max(span.end for span in each.spans) - min(span.start for span in each.spans)
        longest[each.unit] = max(longest[each.unit], took)
    drawn = [_section(replace(each, length=longest[each.unit])) for each in pictures]
    return "".join(drawn) or '<p class="empty">There is no timeline to show.</p>'


def _section(picture: Picture) -> str:
    notes = [*picture.notes, *([_GAPS.format(picture.gaps)] if picture.spans else [])]
    table = ""
    for tag, row in zip(chain(["th"], repeat("td")), _table(picture), strict=False):
        table += f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"
    told = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f'<section><div class="plot">{draw_svg(picture)}</div>{told}<table>{table}</table></section>'


def _most_held(picture: Picture) -> list[float]:
    """Return of each worker how many microbatches' activations it holds at most."""
    changes: list[list[tuple[float, float]]] = [[] for _ in range(picture.num_workers)]
    for span in picture.spans:
        if holds := span.action.kind.keeps:
            share = holds * (picture.spec.share(span.action) if picture.spec else 1)
            changes[span.worker].append((span.start if holds > 0 else span.end, share))
    return [max(accumulate((share for _, share in sorted(own)), initial=0.0)) for own in changes]


def _table(picture: Picture) -> list[list[str]]:
    """Return a heading and a row for each worker: idle time, causes of waits, and held activations."""
    shares = idle(picture.spans, picture.num_workers)
    if not shares:
        return []
    causes: list[dict[str, float]] = [defaultdict(float) for _ in shares]
    for span, wait in picture.waits.items():
        if wait.cause is not None and wait.cause.worker != span.worker:
            causes[span.worker][f"{wait.cause.action.kind} of worker {wait.cause.worker}"] += wait.time
    waited = f"waited for, {picture.unit or 'in units of time'}"
    rows = [["", picture.gaps, waited, *[""] * (_MOST_CAUSES - 1), "most activations held, in microbatches"]]
    held = _most_held(picture)
    for worker, share in enumerate(shares):
        longest = sorted(causes[worker].items(), key=lambda cause: -cause[1])[:_MOST_CAUSES]
        cells = [f"{time:.4g}: {name}" for name, time in longest]
        rows.append([f"worker {worker}", f"{share:.1%}", *cells, *[""] * (_MOST_CAUSES - len(cells)),
                     f"{held[worker]:.4g}"])  # fmt: skip
    if picture.memory:
        rows = [[*row, more] for row, more in zip(rows, ["peak memory", *picture.memory], strict=True)]
    return rows
