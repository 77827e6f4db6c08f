"""Metrics of a run for Prometheus, in OpenMetrics. Needs the extra `rpc-pipe[dispatch]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from .view import View, WorkerRow

_STATES = ("runs", "waits", "between", "starts", "stopped", "left", "gone")


def render(view: View) -> tuple[bytes, str]:
    """Return the response to a scrape, and its content type."""
    registry = CollectorRegistry()
    registry.register(_Collector(view))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view, steps = self._view, self._view.complete_steps(1)
        yield _gauge("workers", "Workers that can be seen.", len(view.headers))
        if steps:
            done = CounterMetricFamily("rpc_pipe_steps", "Steps that all workers have finished.")
            done.add_metric([], steps[0] + 1)
            yield done
        if view.losses:
            yield _gauge("loss", "Loss of the last step.", view.losses[-1][1])
        if (step_ms := view.step_ms()) is not None:
            yield _gauge("step_seconds", "Median time of the recent steps.", step_ms / 1e3, unit="seconds")
        if rate := view.throughput():
            yield _gauge(f"{rate[1]}_per_second", "Throughput of the recent steps.", rate[0])
        if (bubble := view.bubble()) is not None:
            yield _gauge(
                "bubble_ratio", "Share of the workers' time without computing, for any cause.", bubble, unit="ratio"
            )
        yield _gauge("stalled", "1 if nothing finishes.", int(view.stalled))
        if lost := view.lost():
            parts = GaugeMetricFamily(
                "rpc_pipe_lost_seconds", "Time of a step by cause.", labels=["cause"], unit="seconds"
            )
            for cause, ms in {"work": lost.limit_ms, **lost.parts()}.items():
                parts.add_metric([cause], ms / 1e3)
            yield parts
        yield from self._workers()
        yield from self._links()

    def _workers(self) -> Iterator[Metric]:
        rows = self._view.rows()
        values: tuple[tuple[str, str, str, Callable[[WorkerRow], float]], ...] = (
            ("worker_bubble_ratio", "Share of time without computing.", "ratio", lambda row: row.bubble),
            ("worker_action_seconds", "Mean time of an action.", "seconds", lambda row: row.action_ms / 1e3),
            ("worker_memory_peak_bytes", "Most memory held.", "bytes", lambda row: row.peak_mb * 1e6),
            ("worker_outbox_payloads", "Payloads not taken yet.", "", lambda row: row.outbox),
        )
        for name, text, unit, value in values:
            family = GaugeMetricFamily(f"rpc_pipe_{name}", text, labels=["worker"], unit=unit)
            for row in rows:
                if not math.isnan(value(row)):
                    family.add_metric([str(row.worker)], value(row))
            yield family
        states = GaugeMetricFamily("rpc_pipe_worker_state", "1 for the state it is in.", labels=["worker", "state"])
        for row in rows:
            for state in _STATES:
                states.add_metric([str(row.worker), state], int(row.state == state))
        yield states

    def _links(self) -> Iterator[Metric]:
        latency = GaugeMetricFamily(
            "rpc_pipe_link_latency_seconds", "Median way of a payload.", labels=["source", "target"], unit="seconds"
        )
        rate = GaugeMetricFamily(
            "rpc_pipe_link_bytes_per_second", "Payload bytes a second.", labels=["source", "target"]
        )
        for link in self._view.links():
            latency.add_metric([str(link.source), str(link.target)], link.ms / 1e3)
            rate.add_metric([str(link.source), str(link.target)], link.mb_per_s * 1e6)
        yield latency
        yield rate


def _gauge(name: str, text: str, value: float, unit: str = "") -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"rpc_pipe_{name}", text, unit=unit)
    family.add_metric([], value)
    return family
