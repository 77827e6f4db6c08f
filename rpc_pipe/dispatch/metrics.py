"""Metrics of a run for Prometheus, in OpenMetrics. Needs the extra `rpc-pipe[dispatch]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
            yield _gauge("step_seconds", "Median time of the recent steps.", step_ms / 1e3, "seconds")
        if rate := view.throughput():
            yield _gauge(f"{rate[1]}_per_second", "Throughput of the recent steps.", rate[0])
        if (bubble := view.bubble()) is not None:
            yield _gauge(
                "bubble_ratio", "Share of the workers' time without computing, for any cause.", bubble, "ratio"
            )
        yield _gauge("stalled", "1 if nothing finishes.", int(view.stalled))
        if lost := view.lost():
            causes = {(cause,): ms / 1e3 for cause, ms in {"work": lost.limit_ms, **lost.parts()}.items()}
            yield _gauges("lost_seconds", "Time of a step by cause.", ["cause"], causes, "seconds")
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
            yield _gauges(name, text, ["worker"], {(row.worker,): value(row) for row in rows}, unit)
        states = {(row.worker, state): int(row.state == state) for row in rows for state in _STATES}
        yield _gauges("worker_state", "1 for the state it is in.", ["worker", "state"], states)

    def _links(self) -> Iterator[Metric]:
        ends, links = ["source", "target"], {(link.source, link.target): link for link in self._view.links()}
        latency = {pair: link.ms / 1e3 for pair, link in links.items()}
        rate = {pair: link.mb_per_s * 1e6 for pair, link in links.items()}
        yield _gauges("link_latency_seconds", "Median way of a payload.", ends, latency, "seconds")
        yield _gauges("link_bytes_per_second", "Payload bytes a second.", ends, rate)


def _gauge(name: str, text: str, value: float, unit: str = "") -> Metric:
    return _gauges(name, text, [], {(): value}, unit)


def _gauges(name: str, text: str, labels: list[str], values: Mapping[Any, float], unit: str = "") -> Metric:
    """Return a value for each tuple of labels; what is not known of a worker is left out."""
    family = GaugeMetricFamily(f"rpc_pipe_{name}", text, labels=labels, unit=unit)
    for said, value in values.items():
        if not labels or not math.isnan(value):
            family.add_metric(list(map(str, said)), value)
    return family
