"""The figures of a run as OpenMetrics, for Prometheus. Needs the extra `.[dispatch]`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.exposition import generate_latest

from ..tracing.view import View
from .rows import STATES, describe, link_rows, worker_rows


def metrics_of(view: View) -> bytes:
    """Return the text of all metrics; figures that are not known are left out."""
    registry, state, rows = CollectorRegistry(), describe(view), worker_rows(view)

    def tell(name: str, values: Mapping[Any, float | None], *labels: str) -> None:
        unit = next((unit for unit in ("seconds", "ratio", "bytes") if name.endswith(f"_{unit}")), "")
        gauge = Gauge(f"rpc_pipe_{name}", name.replace("_", " "), labels, unit=unit, registry=registry)
        for said, value in values.items():
            if value is not None and not math.isnan(value):
                (gauge.labels(*said) if labels else gauge).set(value)

    if state["step"] is not None:
        Counter("rpc_pipe_steps", "steps that all workers have finished", registry=registry).inc(state["step"])
    figures = {
        "workers": len(rows), "stalled": state["stalled"], "loss": state["loss"], "gradient_norm": state["grad_norm"],
        "held_out_loss": state["held_out"][-1][1] if state["held_out"] else None, "bubble_ratio": state["bubble"],
        "learning_rate": state["learning_rate"], "step_seconds": state["step_ms"] and state["step_ms"] / 1e3,
        f"{state['unit'] or 'rows'}_per_second": state["rate"],
    }  # fmt: skip
    for name, value in figures.items():
        tell(name, {"": value})
    if lost := view.lost():
        tell(
            "lost_seconds", {(cause,): ms / 1e3 for cause, ms in {"work": lost.limit_ms, **lost.parts}.items()}, "cause"
        )
    tell("worker_bubble_ratio", {(row.worker,): row.bubble for row in rows}, "worker")
    tell("worker_action_seconds", {(row.worker,): row.action_ms / 1e3 for row in rows}, "worker")
    tell("worker_memory_peak_bytes", {(row.worker,): row.peak_mb * 1e6 for row in rows}, "worker")
    tell("worker_outbox_payloads", {(row.worker,): row.outbox for row in rows}, "worker")
    tell("worker_state", {(row.worker, s): row.state == s for row in rows for s in STATES}, "worker", "state")
    links, ends = [((link.source, link.target), link) for link in link_rows(view)], ("source", "target")
    tell("link_latency_seconds", {at: link.ms / 1e3 for at, link in links}, *ends)
    tell("link_bytes_per_second", {at: link.mb_per_s * 1e6 for at, link in links}, *ends)
    return bytes(generate_latest(registry))
