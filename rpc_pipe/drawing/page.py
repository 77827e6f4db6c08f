"""Timelines for browsers: a self-contained page in which to zoom, and Chrome's trace event format for Perfetto.

The page is `page.html` with the script, the style and the data (as JSON) put in; the picture follows from the data
alone. Loads without torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..dependency import Kind, Spec
from ..planning.span import Span, Wait, critical_path
from .timeline import held_stages, idle, name_index, summarize

#: placeholder of the data in the template
_MARKER = "@DATA@"
#: number of causes of a worker's waits that are named, the longest first
_MOST_CAUSES = 3
#: the one definition of the gaps' share on all pages
_GAPS = "{}: share of the time, from the first start to the last end, in which a worker runs no action"


@dataclass(frozen=True)
class Picture:
    """One named timeline of a page; times are in `unit`, and count from the first start."""

    name: str
    spans: Sequence[Span]
    num_workers: int
    #: shown behind times, such as "ms"; pictures of one unit share one scale
    unit: str = ""
    #: name of the time without an action: a schedule's `bubble`, or `idle` where times were measured
    gaps: str = "bubble"
    #: the result of `span.waits`
    waits: Mapping[Span, Wait] = field(default_factory=dict)
    #: number of slices of a microbatch's sequence
    slices: int = 1
    #: sentences below the timeline
    notes: Sequence[str] = ()
    #: of each worker, its largest memory as text, where that was measured
    memory: Sequence[str] = ()
    #: the names of the workers' rows, if they say more than the number
    rows: Sequence[str] = ()


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
    """Return the argument of the script's `load`, for JSON."""
    return {
        "palette": {kind.letter: (kind.colour, kind.ink, kind.word) for kind in Kind.all()},
        "pictures": [_encode(picture) for picture in pictures],
    }


def _encode(picture: Picture) -> dict[str, object]:
    """Return the page's data; a span is [worker, stage, kind, microbatch, start, end, wait, cause's index]."""
    first = min((span.start for span in picture.spans), default=0.0)
    spans = sorted(picture.spans, key=lambda s: (s.start, s.end, s.worker))
    at = {span: i for i, span in enumerate(spans)}
    rows: list[list[object]] = []
    for span in spans:
        (stage, kind, index), times = span.action, (_short(span.start - first), _short(span.end - first))
        named = index if picture.slices == 1 else name_index(span.action, picture.slices)
        rows.append([span.worker, stage, kind.letter, named, *times])
        if (wait := picture.waits.get(span)) is not None:
            rows[-1] += [_short(wait.time), -1 if wait.cause is None else at.get(wait.cause, -1)]
    return {
        "name": picture.name,
        "unit": picture.unit,
        "workers": picture.num_workers,
        "names": list(picture.rows) or [f"worker {worker}" for worker in range(picture.num_workers)],
        "gaps": picture.gaps,
        "about": summarize(spans, picture.num_workers, unit=picture.unit, gaps=picture.gaps),
        "stages": held_stages(spans, picture.num_workers),
        "spans": rows,
        "critical": [at[span] for span in critical_path(spans, picture.waits)] if picture.waits else [],
        "notes": [*picture.notes, *([_GAPS.format(picture.gaps)] if picture.spans else [])],
        "held": (held := _held(picture, first)),
        "table": _table(picture, held),
    }


def _held(picture: Picture, first: float) -> list[list[tuple[float, float]]]:
    """Return of each worker how many microbatches' activations it holds: (time, number from then on)."""
    changes: list[list[tuple[float, int]]] = [[] for _ in range(picture.num_workers)]
    for span in picture.spans:
        if holds := span.action.kind.holds:
            changes[span.worker].append((span.start if holds > 0 else span.end, holds))
    curves = []
    for own in changes:
        held, curve = 0, [(0.0, 0.0)]
        for time, way in sorted(own):
            held += way
            curve.append((_short(time - first), _short(held / picture.slices)))
        curves.append(curve)
    return curves


def _table(picture: Picture, held: Sequence[Sequence[tuple[float, float]]]) -> list[list[str]]:
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
    for worker, share in enumerate(shares):
        longest = sorted(causes[worker].items(), key=lambda cause: -cause[1])[:_MOST_CAUSES]
        cells = [f"{time:.4g}: {name}" for name, time in longest]
        most = f"{max(number for _, number in held[worker]):.4g}"
        rows.append([f"worker {worker}", f"{share:.1%}", *cells, *[""] * (_MOST_CAUSES - len(cells)), most])
    if picture.memory:
        rows = [[*row, more] for row, more in zip(rows, ["peak memory", *picture.memory], strict=True)]
    return rows


def _short(value: float) -> float:
    """Drop digits that no screen shows: they are half of the page's size."""
    return float(f"{value:.9g}")


def write_chrome(
    path: str | Path,
    spec: Spec,
    steps: Mapping[int, Sequence[Span]],
    *,
    device: str = "cpu",
    clock_error_ms: float = 0.0,
) -> None:
    """Write the actions of `steps` to a file.

    Args:
        steps: step -> its spans, in milliseconds.
        clock_error_ms: largest difference of two workers' clocks, written to the file's `otherData`.
    """
    events = _events(spec, steps, device)
    whole = {"traceEvents": events, "otherData": {"clock_error_ms": clock_error_ms}}
    Path(path).write_text(json.dumps(whole), encoding="utf-8")


def _events(spec: Spec, steps: Mapping[int, Sequence[Span]], device: str) -> list[dict[str, Any]]:
    origin = min(span.start for spans in steps.values() for span in spans)
    events: list[dict[str, Any]] = []
    for worker in range(spec.num_workers):
        stages = ",".join(str(stage) for stage, _ in spec.hosted(worker))
        name = f"worker {worker} · stage {stages} · {device}"
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": worker, "args": {"name": name}})
    for step, spans in sorted(steps.items()):
        at = {span.action: span for span in spans}
        for span in spans:
            start, end = 1e3 * (span.start - origin), 1e3 * (span.end - origin)
            base = {"pid": 0, "tid": span.worker, "cat": span.action.kind.letter}
            args = {"step": step, "stage": span.action.stage, "microbatch": span.action.microbatch}
            events.append(base | {"ph": "X", "name": str(span.action), "ts": start, "dur": end - start, "args": args})
            for follower in spec.successors(span.action):
                if follower not in at or at[follower].worker == span.worker:
                    continue
                arrow = {"name": "payload", "cat": "payload", "id": f"{step}.{span.action}.{follower}", "pid": 0}
                events.append(arrow | {"ph": "s", "tid": span.worker, "ts": end})
                begin = 1e3 * (at[follower].start - origin)
                events.append(arrow | {"ph": "f", "bp": "e", "tid": at[follower].worker, "ts": begin})
    return events
