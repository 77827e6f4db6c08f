"""A worker's program as JSON: its part of the relation. `listed_relation` reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..dependency import Entry, Order, Spec, period, reaches
from ..schedules import name_of


def list_program(spec: Spec, worker: int, order: Order, program: Iterable[Entry]) -> dict[str, Any]:
    """Return, for JSON, the actions of `worker` in a step, in order, with their needs."""
    entries = [entry for entry in program if spec.orders(entry.action)]
    overlaps = not spec.synchronous
    stream = {
        "period": period(spec),
        "update_every": spec.update_every,
        "replicas": spec.replicas,
        "slots": [spec.slot(entry.action) for entry in entries],
        "earlier": [
            [[back, str(need)] for back, need in reaches(spec, entry.action, spec.needs)] for entry in entries
        ],
    } if overlaps else {}  # fmt: skip
    return {
        **stream,
        "schedule": name_of(spec),
        "worker": worker,
        "microbatches": spec.num_microbatches,
        "order": order,
        "shards": spec.hosted(worker),
        "routes": [spec.route(m) for m in range(spec.num_microbatches)] if spec.num_routes > 1 else [],
        "program": [
            [str(entry.action), *map(str, entry.own), *(str(need.action) for need in entry.pulled)]
            for entry in entries
        ],
    }  # fmt: skip
