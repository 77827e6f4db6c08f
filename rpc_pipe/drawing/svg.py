"""Timelines as SVG, and the page of a run or a schedule, which shows them in browsers. Loads without torch.

The page is live as `rpc-pipe watch` serves it, or one file that holds all. Its script makes the rest from a run's state
as JSON.

Kinds keep their pure colours, because lighter and darker ones collide for colour-blind eyes: several stages of a
worker differ by a dark stripe along the bottom of the cell, the higher the later the stage.
"""

import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import chain, repeat
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from ..dependency import Kind, Spec
from ..planning.span import Span, Wait, critical_path, most_held
from .timeline import held_stages, idle, index_text, shortest_of, summarize, tell

#: width of the plot in pixels: wide enough for the labels of the shortest cells, within these bounds
_NARROWEST, _WIDEST = 640, 1280
#: height that all rows together aim at, and bounds of one row, in pixels
_ROWS, _LOWEST, _HIGHEST = 704, 7, 24
#: mean width of a character in units of the font size, on the safe side of the usual sans-serif fonts
_CHARACTER = 0.6
#: no text is smaller than this, in pixels
_SMALLEST_TEXT = 7.0
_MARGIN = 12
#: share of a cell's height that the stripe of a worker's last stage takes
_STRIPE = 0.28
#: longer than so many of its shortest actions a picture has two ends, each of half as many as are legible
_MOST_COLUMNS, _LEGIBLE = 1280, 96

_COLOURS = {"paper": "#ffffff", "ink": "#1f2328", "dim": "#59636e", "bubble": "#e6eaef"}


@dataclass(frozen=True)
class Picture:
    """One named timeline; times are in `unit`, and count from the first start."""

    name: str
    #: of workers 0 to `num_workers` - 1
    spans: Sequence[Span]
    num_workers: int
    #: shown behind times, such as "ms"
    unit: str = ""
    #: name of the time without an action: a schedule's `bubble`, or `idle` where times were measured
    gaps: str = "bubble"
    #: the result of `span.waits`, which gives the critical path
    waits: Mapping[Span, Wait] = field(default_factory=dict)
    #: names slices of sequences; None: they are whole
    spec: Spec | None = None
    #: sentences below the timeline
    notes: Sequence[str] = ()
    #: of each worker, its largest memory as text, where that was measured
    memory: Sequence[str] = ()
    #: the names of the workers' rows, if they are more than the number
    rows: Sequence[str] = ()
    #: number of stages; None: as many as ran
    num_stages: int | None = None
    #: least time of the axis, so that pictures have one scale; 0: the picture's length
    length: float = 0.0
    #: whether a picture that is too long for its cells to be seen leaves out what is between its ends
    ends: bool = False


def draw_svg(picture: Picture) -> str:
    """Return an SVG document of a picture. The same picture gives the same text.

    Raises:
        ValueError: a time is not a finite number.
    """
    spans, title = picture.spans, picture.name
    if not all(math.isfinite(span.start) and math.isfinite(span.end) for span in spans):
        raise ValueError(f"{title}: times must be finite")
    how = {"unit": picture.unit, "gaps": picture.gaps}
    about = summarize(spans, picture.num_workers, num_stages=picture.num_stages, **how)
    layout = _Layout(picture)
    held = held_stages(spans, picture.num_workers)
    shown = {span.action.kind for span in spans}
    kinds = [kind for kind in Kind.all() if kind in shown]
    foot, legend = _legend(layout, kinds, max(map(len, held), default=0)) if spans else (layout.bottom, [])
    width, height = _number(layout.width), _number(foot + _MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="rpc-pipe" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(f"{title}: {about}" if title else about)}>',
        f"<style>{_style(layout, kinds)}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
        _text(_MARGIN, 24, title, "ink", 16, " font-weight='600'"),
        _text(_MARGIN, 43, about, "dim", 12),
    ]
    if spans:
        parts += [*_axis(layout), *_rows(layout, spans, held), *legend]
    return "\n".join([*parts, "</svg>", ""])


class _Layout:
    """The layout, in pixels."""

    def __init__(self, picture: Picture) -> None:
        spans, num_workers, spec = picture.spans, picture.num_workers, picture.spec
        self.num_workers, self.spec, self.waits, self.gaps = num_workers, spec, picture.waits, picture.gaps
        self.critical = {*critical_path(spans, picture.waits)} if picture.waits else set[Span]()
        self.names = picture.rows or [f"worker {worker}" for worker in range(num_workers)]
        #: first start, and time from there to the last end; 1 where no time passed
        self.first = min((span.start for span in spans), default=0.0)
        self.length = max(max((span.end for span in spans), default=0.0) - self.first, picture.length) or 1.0
        #: height of a cell, and from row to row
        self.pitch = min(_HIGHEST, max(_LOWEST, _ROWS // max(1, num_workers)))
        self.cell = self.pitch - 2 if self.pitch > 12 else self.pitch - 1
        #: largest size of text in cells, and characters of the longest
        self.font = min(12.0, max(_SMALLEST_TEXT, math.floor(self.cell * 1.5) / 2))
        self.longest = max((len(_label(span, spec)) for span in spans), default=1)
        #: left edge and width of the plot, and upper edge of the first row
        self.left = _MARGIN + max((_width(name, min(12.0, self.pitch)) for name in self.names), default=0.0) + 6
        shortest = shortest_of(spans)
        #: from where to where the axis is cut; the length is that of the rest
        self.cut = self.length, self.length
        if picture.ends and self.length > _MOST_COLUMNS * shortest:
            half = _LEGIBLE // 2 * shortest
            self.cut, self.length = (half, self.length - half), 2 * half
        labels = (self.longest * self.font * _CHARACTER + 4) * self.length / shortest
        self.plot, self.top = _WIDEST if picture.length else min(_WIDEST, max(_NARROWEST, labels)), 56
        #: width of the line that parts neighbouring cells
        self.seam = min(1.0, 0.15 * shortest * self.plot / self.length)
        #: width of the picture, and lower edge of the last row
        self.width = self.left + self.plot + _MARGIN
        self.bottom = self.top + (num_workers * self.pitch if spans else 0)

    def x(self, time: float) -> float:
        """Return where `time` is, from the left edge of the plot."""
        at, (first, last) = time - self.first, self.cut
        return (min(at, first) + max(at - last, 0)) / self.length * self.plot


def _style(layout: _Layout, kinds: Sequence[Kind]) -> str:
    colours = "".join(f".rpc-pipe .{name}{{fill:{colour}}}" for name, colour in _COLOURS.items())
    colours += "".join(f".rpc-pipe .{kind}{{fill:{kind.colour}}}" for kind in kinds)
    colours += "".join(f".rpc-pipe .tick.{kind}{{stroke:{kind.colour}}}" for kind in kinds)
    colours += "".join(f".rpc-pipe .seam .{kind}~text{{fill:{kind.ink}}}" for kind in kinds if kind.ink != "#000000")
    return (
        ".rpc-pipe text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        f"{colours}.rpc-pipe .grid{{stroke:#c8d1da}}"
        f".rpc-pipe .seam rect{{stroke:{_COLOURS['paper']};stroke-width:{_number(layout.seam)}}}"
        ".rpc-pipe .seam text{text-anchor:middle;pointer-events:none}"
        ".rpc-pipe .stripe{fill:#000;fill-opacity:.55}.rpc-pipe .tick{stroke-width:2}"
        + f".rpc-pipe .critical{{fill:{_COLOURS['ink']}}}"
        * bool(layout.critical)
    )


def _axis(layout: _Layout) -> Iterator[str]:
    """Yield the tracks, which are visible where workers idle, and a line and a number at round times."""
    yield "<g>"
    for worker in range(layout.num_workers):
        yield _rect("bubble", layout.left, layout.top + worker * layout.pitch, layout.plot, layout.cell)
    yield "</g>"
    step = nice_step(layout.length, layout.plot / 64)
    decimals = max(0, -math.floor(math.log10(step)))
    first, last = layout.cut
    for i in range(math.floor((layout.length + last - first) / step * (1 + 1e-9)) + 1):
        if first < i * step < last:
            continue
        x = layout.left + layout.x(layout.first + i * step)
        yield f'<path class="grid" d="M{_number(x)} {_number(layout.bottom)}v5"/>'
        yield _text(x, layout.bottom + 17, f"{i * step:.{decimals}f}", "dim", 11, " text-anchor='middle'")
    if first < last:
        x, told = layout.left + layout.x(layout.first + first), f"⋯ {tell(first)} to {tell(last)} is left out"
        line = f"M{_number(x)} {layout.top - 4}V{_number(layout.bottom + 5)}"
        yield f'<path class="grid" stroke-dasharray="4" d="{line}"/>'
        yield _text(x, layout.top - 4, told, "dim", 11, " text-anchor='middle'")


def _rows(layout: _Layout, spans: Sequence[Span], held: Sequence[Sequence[int]]) -> Iterator[str]:
    size = min(12.0, max(_SMALLEST_TEXT, layout.pitch * 0.75))
    levels = max(map(len, held)) - 1
    by_worker: list[list[Span]] = [[] for _ in range(layout.num_workers)]
    first, last = (layout.first + each for each in layout.cut)
    for span in spans:
        if span.start < first or span.end > last or first == last:
            by_worker[span.worker].append(span)
    for worker, own in enumerate(by_worker):
        y = layout.top + worker * layout.pitch
        named, place = layout.names[worker], f"translate({_number(layout.left)},{_number(y)})"
        yield _text(layout.left - 6, y + layout.cell / 2 + 0.35 * size, named, "ink", size, " text-anchor='end'")
        yield f'<g class="seam" font-size="{_number(layout.font)}" transform="{place}">'
        # An action without a duration is drawn last, because a neighbour would cover it.
        for span in sorted(own, key=lambda s: (s.end <= s.start, s.start, s.end)):
            level = held[worker].index(span.action.stage) / levels if levels else 0.0
            yield _cell(layout, span, _STRIPE * level, 1 - _STRIPE * (levels > 0))
        yield "</g>"


def _cell(layout: _Layout, span: Span, stripe: float, free: float) -> str:
    """Return a cell, or a tick if the action took no time, with a tooltip.

    `stripe` and `free` are the shares of its height that the stripe takes and that stripes leave to the text.
    """
    kind, stage = span.action.kind.letter, span.action.stage
    start, end = span.start - layout.first, span.end - layout.first
    named = f"{stage}{kind}{index_text(layout.spec, span.action)}"
    told = f"{named}, stage {stage}, {tell(start)} to {tell(end)}"
    if (wait := layout.waits.get(span)) is not None:
        told += f"; waited {tell(wait.time)}"
        told += f" for {wait.cause.action} of worker {wait.cause.worker}" if wait.cause is not None else ""
    hint = f"<title>{told}</title>"
    x, height = layout.x(span.start), _number(layout.cell)
    if span.end <= span.start:
        return f'<path class="tick {kind}" d="M{_number(x)} 0v{height}">{hint}</path>'
    # Even the shortest action leaves a trace.
    width = max(layout.x(span.end) - x, 0.3)
    parts = [f'<g>{hint}<rect class="{kind}" x="{_number(x)}" width="{_number(width)}" height="{height}"/>']
    if stripe:
        edge, high = layout.seam / 2, stripe * layout.cell
        y, wide = _number(layout.cell - high - edge), _number(width - 2 * edge)
        parts.append(f'<path class="stripe" d="M{_number(x + edge)} {y}h{wide}v{_number(high)}h-{wide}z"/>')
    if span in layout.critical:
        parts.append(f'<path class="critical" d="M{_number(x)} 0h{_number(width)}v2h-{_number(width)}z"/>')
    label = _label(span, layout.spec)
    # All labels count as long as the longest, so that equal cells have equal ones: narrow cells have no kind.
    for left_out in range(2):
        size = min(layout.font, (width - 1.5) / (max(1, layout.longest - left_out) * _CHARACTER))
        if size >= _SMALLEST_TEXT and layout.cell >= size:
            y = _number(layout.cell * free / 2 + 0.36 * size)
            smaller = f' font-size="{_number(size)}"' if size < layout.font else ""
            parts.append(f'<text x="{_number(x + width / 2)}" y="{y}"{smaller}>{label[left_out:] or label}</text>')
            break
    return "".join([*parts, "</g>"])


def _legend(layout: _Layout, kinds: Sequence[Kind], num_held: int) -> tuple[float, list[str]]:
    """Return the lower edge of the legend, and the legend: the kinds that occur, line by line."""
    entries = [*((kind.letter, f"{kind} {kind.word}") for kind in kinds), ("bubble", layout.gaps)]
    entries += [("critical", "critical path")] if layout.critical else []
    entries += [("stripe", "later stages of the worker: the later, the higher")] if num_held > 1 else []
    x, y, parts = layout.left, layout.bottom + 30, []
    for name, words in entries:
        taken = 17 + _width(words, 12) + 16
        if x > layout.left and x + taken > layout.width:
            x, y = layout.left, y + 20
        parts.append(_rect("bubble" if name == "stripe" else name, x, y, 12, 12))
        if name == "stripe":
            parts.append(_rect("dim", x, y + 8, 12, 4))
        parts.append(_text(x + 17, y + 10.5, words, "ink", 12))
        x += taken
    return y + 14, parts


def nice_step(length: float, most: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten that divides `length` into at most `most` parts."""
    least = length / max(most, 1.0)
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10, 20) if m * power >= least * (1 - 1e-9))


def _label(span: Span, spec: Spec | None) -> str:
    """Return the kind and the microbatch as label; the kind alone if its index is a replica or an update."""
    return span.action.kind.letter + (index_text(spec, span.action) if span.action.kind.per_microbatch else "")


def _width(text: str, size: float) -> float:
    return len(text) * size * _CHARACTER


def _rect(name: str, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{_number(x)}" y="{_number(y)}"'
    return f'<rect class="{name}" {place} width="{_number(width)}" height="{_number(height)}"/>'


def _text(x: float, y: float, text: str, name: str, size: float, more: str = "") -> str:
    place = f'x="{_number(x)}" y="{_number(y)}"'
    return f'<text class="{name}" {place} font-size="{_number(size)}"{more}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


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
    return fill_page(TITLE=html.escape(title), PICTURES=sections(pictures), DATA=data)


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
        table += f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>"
    told = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f'<section><div class="plot">{draw_svg(picture)}</div>{told}<table>{table}</table></section>'


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
    held = most_held(picture.spans, picture.num_workers, picture.spec)
    for worker, share in enumerate(shares):
        longest = sorted(causes[worker].items(), key=lambda cause: -cause[1])[:_MOST_CAUSES]
        cells = [f"{time:.4g}: {name}" for name, time in longest]
        rows.append([f"worker {worker}", f"{share:.1%}", *cells, *[""] * (_MOST_CAUSES - len(cells)),
                     f"{held[worker]:.4g}"])  # fmt: skip
    if picture.memory:
        rows = [[*row, more] for row, more in zip(rows, ["peak memory", *picture.memory], strict=True)]
    return rows
