"""Plans as a table, and the Pareto front of time and memory as text and as a picture."""

import math
from collections.abc import Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from rich.table import Table

from ..dependency import G, R
from ..planning.plan import Plan
from ..planning.profile import TIMED, Profile
from ..system.sizes import format_bytes
from .svg import nice_step

#: kinds in the picture of a profile
_SHOWN = tuple(kind for kind in TIMED if kind not in (R, G))
#: size and margin of the picture, in pixels
_WIDTH, _HEIGHT, _MARGIN = 640, 400, 56
#: mean width of a character of a label
_CHARACTER = 7
#: height of a line of text
_LINE = 13
_STYLE = (
    "text{font:12px sans-serif;fill:#1f2328}.dim{fill:#59636e}.line{fill:none;stroke:#0072b2;stroke-width:1.5}"
    ".axis{fill:none;stroke:#59636e}circle{fill:#0072b2}"
)
#: most plans in a table
_MOST_PLANS = 10
#: characters of the longest bar
_BAR = 20
#: most stages with blocks listed one by one
_MOST_STAGES = 7


def plans_table(plans: Sequence[Plan]) -> Table:
    """Return a table of the best plan of each schedule with its parameters."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("schedule", max_width=32)
    drawn.add_column("cut", no_wrap=True, max_width=12)
    for heading in ("M", "ms", "memory", "bubble", "msgs"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    shown: dict[str, Plan] = {}
    for plan in plans:
        shown.setdefault(f"{plan.schedule} {sorted(plan.parameters.items())} {plan.sharing}", plan)
    for plan in list(shown.values())[:_MOST_PLANS]:
        figures = f"{plan.predicted_ms:.4g}", format_bytes(plan.predicted_memory), f"{plan.bubble:.0%}"
        drawn.add_row(plan.name, cut_text(plan.cut), str(plan.num_microbatches), *figures, str(plan.messages))
    return drawn


def profile_table(profile: Profile, rows: int) -> Table:
    """Return a table of the times and bytes of each block, for microbatches of `rows` rows."""
    drawn = Table(title=f"{profile.model}, {rows} rows a microbatch, on {profile.device}", box=None, pad_edge=False)
    drawn.add_column("block", overflow="fold")  # alone may wrap: of a narrow table no number is cut off
    for heading in (*(f"{kind.letter} ms" for kind in _SHOWN), "weights", "activations", "hands on"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for block in profile.at(rows):
        times = [_ms(block.times.get(kind, 0)) for kind in _SHOWN]
        size = block.size
        drawn.add_row(block.name, *times, *map(format_bytes, (size.weights, size.activations, size.outputs)))
    if any(profile.per_stage.values()):
        around = [_ms(profile.per_stage.get(kind, 0)) for kind in _SHOWN]
        drawn.add_row("each stage besides", *around, "", "", "")
    return drawn


def _ms(time: float) -> str:
    """Write a time in at most five characters, unless it is minutes: six columns of them leave room for a name.

    >>> _ms(0), _ms(0.00994), _ms(0.0365), _ms(1.25), _ms(98.7), _ms(1234.5)
    ('0', '0.01', '0.036', '1.25', '98.7', '1234')
    """
    return f"{time:.0f}" if time >= 100 else f"{time if time >= 0.1 else round(time, 3):.3g}"


def cut_text(cut: Sequence[int]) -> str:
    """Write a cut; runs of equal stages shortly.

    >>> cut_text([3, 2, 2, 3]), cut_text([2] * 16)
    ('3,2,2,3', '16 x 2')
    """
    if len(cut) <= _MOST_STAGES:
        return ",".join(map(str, cut))
    runs = [(len(list(same)), size) for size, same in groupby(cut)]
    text = ",".join(str(size) if count == 1 else f"{count} x {size}" for count, size in runs)
    return text if len(text) < 24 else f"{len(cut)} stages of {min(cut)} to {max(cut)}"


def front_text(front: Sequence[Plan]) -> str:
    """Return a line for each plan of the Pareto front, with a bar of its time."""
    slowest = max((plan.predicted_ms for plan in front), default=0) or 1
    largest = max((plan.predicted_memory for plan in front), default=0) or 1
    lines = []
    for plan in front:
        time = "█" * round(_BAR * plan.predicted_ms / slowest)
        memory = "▒" * round(_BAR * plan.predicted_memory / largest)
        took, held = f"{plan.predicted_ms:9.4g} ms {time:<{_BAR}}", f"{format_bytes(plan.predicted_memory):>8}"
        lines.append(f"{took} {held} {memory:<{_BAR}} {plan.name}, {plan.num_microbatches} microbatches")
    return "\n".join(lines)


def front_svg(front: Sequence[Plan], title: str = "") -> str:
    """Return an SVG document of time against memory."""
    slowest = max((plan.predicted_ms for plan in front), default=1) * 1.1 or 1
    largest = max((plan.predicted_memory for plan in front), default=1) * 1.1 or 1
    right, bottom = _WIDTH - _MARGIN, _HEIGHT - _MARGIN

    def x(memory: float) -> float:
        return round(_MARGIN + (right - _MARGIN) * memory / largest, 1)

    def y(time: float) -> float:
        return round(bottom - (bottom - _MARGIN) * time / slowest, 1)

    ordered = sorted(front, key=lambda plan: plan.predicted_memory)
    path = " ".join(f"{x(plan.predicted_memory)},{y(plan.predicted_ms)}" for plan in ordered)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<text x="{_MARGIN}" y="24">{escape(title)}</text>',
        f'<path class="axis" d="M{_MARGIN} {_MARGIN}V{bottom}H{right}"/>',
        f'<text class="dim" x="{right}" y="{bottom + 38}" text-anchor="end">memory of the fullest worker</text>',
        f'<text class="dim" x="{_MARGIN - 8}" y="{_MARGIN - 10}">ms a step</text>',
    ]
    for memory in _ticks(largest):
        parts.append(f'<path class="axis" d="M{x(memory)} {bottom}v4"/>')
        said = format_bytes(memory)
        parts.append(f'<text class="dim" x="{x(memory)}" y="{bottom + 18}" text-anchor="middle">{said}</text>')
    for time in _ticks(slowest):
        parts.append(f'<path class="axis" d="M{_MARGIN} {y(time)}h-4"/>')
        parts.append(f'<text class="dim" x="{_MARGIN - 7}" y="{y(time) + 4}" text-anchor="end">{time:g}</text>')
    parts.append(f'<polyline class="line" points="{path}"/>')
    named = math.inf
    for plan in reversed(ordered):  # the fastest, at the bottom, is named first
        about = f"{plan.name}: {plan.predicted_ms:.4g} ms, {format_bytes(plan.predicted_memory)}"
        across, down = x(plan.predicted_memory), y(plan.predicted_ms)
        parts.append(f'<circle cx="{across}" cy="{down}" r="4"><title>{escape(about)}</title></circle>')
        if down < named - _LINE:  # a narrower block is named by its tooltip alone
            named, left = down, min(across + 6, _WIDTH - _CHARACTER * len(plan.schedule))
            parts.append(f'<text x="{round(left, 1)}" y="{round(down - 6, 1)}">{escape(plan.schedule)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(largest: float) -> list[float]:
    """Return round numbers from 0 to at most `largest`, at most seven of them.

    >>> _ticks(534.1), _ticks(7)
    ([0.0, 100.0, 200.0, 300.0, 400.0, 500.0], [0.0, 2.0, 4.0, 6.0])
    """
    step = nice_step(largest, 6)
    return [round(step * at, 10) for at in range(int(largest / step) + 1)]
