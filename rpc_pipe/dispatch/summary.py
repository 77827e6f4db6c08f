"""The contents of a view as JSON, for programs and for the page."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ..drawing.page import Picture
from ..planning.waits import waits
from .view import View

#: most spans that are shown (fewer steps are shown then), and most for which causes of waits are computed
_MOST_SPANS, _MOST_EXPLAINED = 100_000, 6_000


def draw_steps(view: View, count: int) -> list[Picture]:
    """Return the last `count` steps, planned and actual; fewer if they are very large."""
    trace = view.trace(count)
    if trace is None:
        return [Picture("planned", [], view.num_workers), Picture("actual", [], view.num_workers)]
    largest = max(sum(len(record.actions) for record in records) for records in trace.steps.values())
    trace = view.trace(max(1, min(count, _MOST_SPANS // max(1, largest)))) or trace
    workers, spec, found = view.num_workers, trace.spec, []
    planned = trace.simulated(len(trace.steps)).spans
    for name, spans in (("planned", planned), ("actual", trace.spans())):
        causes = waits(spec, spans, slack=trace.clock_error_ms) if len(spans) <= _MOST_EXPLAINED else {}
        found.append(Picture(name, spans, workers, "ms", "idle", causes))
    return found


def describe(view: View) -> dict[str, Any]:
    """Return the present state of the run, for JSON; unknown numbers are null."""
    lost, steps, rate = view.lost(), view.complete_steps(1), view.throughput()
    header = next(iter(view.headers.values()), {})
    return {
        "schedule": header.get("schedule"),
        "num_workers": view.num_workers,
        "step": steps[0] if steps else None,
        "loss": finite(view.losses[-1][1]) if view.losses else None,
        "step_ms": view.step_ms(),
        "rate": rate[0] if rate else None,
        "unit": rate[1] if rate else None,
        "bubble": view.bubble(),
        "stalled": view.stalled,
        "ending": view.ending._asdict() if view.ending is not None else None,
        "clock_error_ms": view.clock_error_ms,
        "dropped": view.dropped,
        "workers": [{key: finite(value) for key, value in asdict(row).items()} for row in view.rows()],
        "links": list(map(asdict, view.links())),
        "events": list(view.events)[-100:],
        "lost": lost.as_json() if lost else None,
    }


def finite(value: Any) -> Any:
    """Return a number, or None if it is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
