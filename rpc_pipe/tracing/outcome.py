"""What a run leaves when its workers end together: figures, and the last steps as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..planning.simulator import simulate
from .lost import attribute
from .trace import Trace, planned_and_actual
from .training import Training

#: what is in the file that an option names
FILES = {"save": "weights", "trace": "trace", "html": "page"}
#: steps that a run keeps for its figures and files
RECORDED_STEPS = 12


def figures(trace: Trace, pipe: Training, *, one_machine: bool) -> dict[str, Any]:
    """Return what the recorded steps say of the run, for JSON."""
    planned = simulate(trace.spec, trace.cost())
    device = pipe.actors[0].courier.device.type
    cores = len(os.sched_getaffinity(0)) if one_machine and device == "cpu" else None
    shards = [pipe.shards(worker) for worker in range(trace.spec.num_workers)]
    return {
        "steps": max(trace.steps) + 1,
        "workers": trace.spec.num_workers,
        "loss": trace.steps[max(trace.steps)][0].loss,
        "step_ms": trace.step_ms,
        **_throughput(trace),
        "bubble_planned": planned.bubble,
        "bubble_actual": trace.bubble,
        "peak_activations": list(planned.peak_activations),
        "clock_error_ms": trace.clock_error_ms,
        "lost": attribute(trace, shards, cores).as_json(),
    }


def _throughput(trace: Trace) -> dict[str, float]:
    records: Sequence[Any] = [steps[0] for steps in trace.steps.values()]
    tokens, rows = sum(record.tokens for record in records), sum(record.rows for record in records)
    name, count = ("tokens_per_s", tokens) if tokens else ("rows_per_s", rows)
    return {name: 1e3 * count / (len(records) * trace.step_ms)} if trace.step_ms else {}


def write_timelines(trace: Trace, device: str, *, chrome: str | None, html: str | None) -> None:
    """Write the recorded steps for Chrome's tracing, and the last one, planned and actual, as a page."""
    if chrome is not None:
        trace.write_chrome(chrome, device)
    if html is not None:
        planned = simulate(trace.spec, trace.cost())
        Path(html).write_text(planned_and_actual(planned, trace), encoding="utf-8")
