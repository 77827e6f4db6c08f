"""Timelines as one self-contained HTML page, in which a browser can zoom.

The page is `page.html` with the script, the style and the data (as JSON) put in; what is drawn follows from the data
alone. Loads without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from ..dependency import Kind
from ..planning.span import Span
from ..planning.waits import Wait
from .timeline import held_stages, name_index, summarize

#: placeholder of the data in the template
_MARKER = "@DATA@"


@dataclass(frozen=True)
class Picture:
    """One named timeline of a page; times are in `unit`, and count from the first start."""

    name: str
    spans: Sequence[Span]
    num_workers: int
    #: shown behind times, such as "ms"; pictures of one unit share one scale
    unit: str = ""
    #: what the time is called in which nothing ran: a schedule's `bubble`, or `idle` where times were measured
    gaps: str = "bubble"
    #: the result of `waits.waits`
    waits: Mapping[Span, Wait] = field(default_factory=dict)
    #: number of slices of a microbatch's sequence
    slices: int = 1


def draw_page(pictures: Sequence[Picture]) -> str:
    """Return a self-contained HTML page with the pictures one above the other, on one axis of time.

    Raises:
        ValueError: a time is not a finite number.
    """
    text = json.dumps(encode(pictures), separators=(",", ":"), allow_nan=False)
    # In a script element only `<` can end the element or begin a comment; JSON may write it as an escape.
    text = text.replace("<", "\\u003c")
    return with_parts(files(__package__).joinpath("page.html").read_text(encoding="utf-8")).replace(_MARKER, text)


def with_parts(template: str) -> str:
    """Put the timelines' style and script into a page."""
    for marker, name in (("@STYLE@", "timeline.css"), ("@SCRIPT@", "timeline.js")):
        template = template.replace(marker, files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return template


def encode(pictures: Sequence[Picture]) -> dict[str, object]:
    """Return what the script's `load` takes, for JSON."""
    return {
        "palette": {kind.letter: (kind.colour, kind.ink, kind.word) for kind in Kind.all()},
        "pictures": [_encode(picture) for picture in pictures],
    }


def _encode(picture: Picture) -> dict[str, object]:
    """Return what the page reads; a span is [worker, stage, kind, microbatch, start, end, wait, cause's index]."""
    first = min((span.start for span in picture.spans), default=0.0)
    spans = sorted(picture.spans, key=lambda s: (s.start, s.end, s.worker))
    at = {span: i for i, span in enumerate(spans)}
    rows: list[list[object]] = []
    for span in spans:
        stage, kind, microbatch = span.action
        row: list[object] = [
            span.worker,
            stage,
            kind.letter,
            microbatch if picture.slices == 1 else name_index(span.action, picture.slices),
            _short(span.start - first),
            _short(span.end - first),
        ]
        wait = picture.waits.get(span)
        if wait is not None:
            row += [_short(wait.time), -1 if wait.cause is None else at.get(wait.cause, -1)]
        rows.append(row)
    return {
        "name": picture.name,
        "unit": picture.unit,
        "workers": picture.num_workers,
        "gaps": picture.gaps,
        "about": summarize(spans, picture.num_workers, unit=picture.unit, gaps=picture.gaps),
        "stages": held_stages(spans, picture.num_workers),
        "spans": rows,
    }


def _short(value: float) -> float:
    """Drop digits that no screen shows: they are half of the page's size."""
    return float(f"{value:.9g}")
