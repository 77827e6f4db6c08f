"""The terminal display of a run: workers, the last step, the lost time, the log. It needs 80 columns."""

import math
import time
from collections.abc import Iterator
from functools import partial

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..boards.stall_report import duration
from ..boards.view import View
from ..drawing.timeline import draw
from ..tracing.lost_time import lost_time
from ..tracing.trace import recent_trace
from .rows import WorkerRow, worker_rows

#: a worker that has waited longer than this is coloured
_LONG_WAIT_S = 1.0
_COLOURS = {
    "runs": "green", "waits": "yellow", "between": "cyan", "starts": "dim", "left": "dim",
    "gone": "bold red", "stopped": "bold red",
}  # fmt: skip
_LEAST_ROWS = 24
#: a line that is cut off at the right edge
_cropped = partial(Text, no_wrap=True, overflow="ellipsis")


class Screen:
    """Draws a view into the console's width and height."""

    def __init__(self, view: View, name: str) -> None:
        self._view, self._name = view, name

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or max(_LEAST_ROWS, console.height)
        state = Group(*self._state(width, height - 7))
        yield state
        taken = len(console.render_lines(state, options.update(height=None), pad=False))
        yield from self._events(max(1, height - taken - 2))

    def _state(self, width: int, free: int) -> Iterator[RenderableType]:
        """Yield the current state; workers, and the step as it ran, have a given number of lines."""
        view = self._view
        if not view.headers:
            yield Text(f"{self._name}: no worker can be seen yet", style="dim")
            return
        yield self.title()
        rows, trace, lost = worker_rows(view), recent_trace(view, 1), lost_time(view)
        yield self._table(rows, width) if len(rows) < free else self._cells(rows)
        if trace is not None and 2 * len(rows) < free:
            yield _cropped(f"step {max(trace.steps)} as it ran", "bold")
            spec = trace.spec
            yield draw(trace.spans(last=1), spec.num_workers, width=width, spec=spec, numbers=trace.numbers)
        if lost is not None:
            yield _cropped(lost.line(), "bold")
            yield Text(lost.sentence, overflow="fold")

    def title(self) -> Text:
        """Return the state of the run in one line."""
        view = self._view
        seen = f"{len(view.headers)} of " * (len(view.headers) < view.num_workers) + f"{view.num_workers} workers"
        ended = f" {view.latest.ending.what}:" if view.latest.ending is not None else ":"
        parts = [f"{self._name}{ended} {view.header['schedule']} on {seen}"]
        if steps := view.complete_steps(1):
            parts.append(f"step {steps[0]}")
        if view.losses:
            parts.append(f"loss {view.losses[-1][1]:.4f}")
        if (step_ms := view.step_ms()) is not None:
            parts.append(f"{step_ms:.0f} ms/step")
        if throughput := view.throughput():
            parts.append(f"{throughput[0]:,.0f} {throughput[1]}/s{' with padding' * view.with_padding}")
        return Text("  ".join(parts), style="bold", overflow="fold")

    def _table(self, rows: list[WorkerRow], width: int) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), width=width, header_style="dim", show_edge=False)
        figures = "stage", "step", "ms/act", "idle", "waits for", "since", "peak MB", "out"
        for name in ("worker", "process", "state", *figures):
            right = name not in ("state", "waits for")
            table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
        for row in rows:
            does = Text(f"{row.state} {row.action}".strip(), style=_COLOURS.get(row.state, ""))
            since = Text(duration(1e9 * row.for_s), style="bold red" if self._late(row) else "")
            now = str(row.step), _number(row.action_ms, ".1f"), _number(100 * row.bubble, ".0f", " %")
            last = _number(row.peak_mb, ".0f"), str(row.outbox)
            table.add_row(str(row.worker), row.process, does, row.stages, *now, row.waits_for, since, *last)
        return table

    def _cells(self, rows: list[WorkerRow]) -> Group:
        """Draw many workers, several on a line: number, action or awaited worker, idle time."""
        cells = []
        for row in rows:
            does = row.action or (f"<{row.waits_for.replace(' of ', '@')}" if row.waits_for else row.state)
            cell = f"{row.worker:>3} {does[:9]:<9} {_number(100 * row.bubble, '.0f', '%'):>4}"
            cells.append(Text(cell, style="bold red" if self._late(row) else _COLOURS.get(row.state, "")))
        return Group(Text("worker, what it does or waits for, idle", style="dim"), Columns(cells))

    def _late(self, row: WorkerRow) -> bool:
        return row.state == "waits" and row.for_s > _LONG_WAIT_S

    def _events(self, room: int) -> Iterator[Text]:
        for at, text, warning in list(self._view.events)[-room:]:
            clock = time.strftime("%H:%M:%S", time.localtime(at))
            yield _cropped(f"{clock} {text}", "yellow" if warning else "dim")


def _number(value: float, form: str, unit: str = "") -> str:
    return "" if math.isnan(value) else f"{value:{form}}{unit}"
