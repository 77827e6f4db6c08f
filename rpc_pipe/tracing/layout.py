"""The layout of a run in words: which process holds which part of the model. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..drawing.timeline import row_names

#: most stages that are described one by one
_MOST_STAGES = 8


def layout(headers: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the layout in a line, from the headers of all processes; "" before all of them hold their stages."""
    first = next(iter(headers.values()), {})
    workers, members = first.get("num_workers", 0), first.get("members", 1)
    if (
        not headers
        or len(headers) < workers * members
        or not all(header.get("parameters") for header in headers.values())
    ):
        return ""
    stages: dict[int, tuple[int, int]] = {}  # stage -> its blocks and its parameters
    for header in headers.values():
        for (stage, _, blocks, *_), parameters in zip(header["shards"], header["parameters"], strict=True):
            stages[stage] = blocks, parameters
    replicas = first["replicas"]
    parts = [f"{len(stages)} stage{'s' * (len(stages) != 1)}"]
    if workers // replicas != len(stages):
        parts[0] += f" on {workers // replicas} workers"
    parts += [f"{count} {what}" for count, what in ((replicas, "replicas"), (members, "members")) if count > 1]
    whole = f"{len(headers)} process{'es' * (len(headers) > 1)}: {' x '.join(parts)}"
    zero = f", zero {first['zero']}" if first["zero"] else ""
    told, begin = [], 0
    for stage, (blocks, parameters) in sorted(stages.items()):
        which = f"block {begin}" if blocks == 1 else f"blocks {begin}-{begin + blocks - 1}"
        told.append(f"stage {stage}: {which if blocks else 'no block'}, {_amount(parameters)} parameters")
        begin += blocks
    if more := len(told) - _MOST_STAGES:
        told = [*told[:_MOST_STAGES], f"{more} more stages"] if more > 0 else told
    return "; ".join([whole + zero, *told])


def rows(headers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the names of the rows of a timeline, in order of workers; none for a recording without a layout."""
    by_worker = {header["worker"]: header for header in headers.values()}
    first = next(iter(by_worker.values()), {})
    if "replicas" not in first or len(by_worker) < first["num_workers"]:
        return []
    hosted = [[(stage, route) for stage, route, *_ in header["shards"]] for _, header in sorted(by_worker.items())]
    return row_names(hosted, first["num_routes"], first["replicas"])


def _amount(number: int) -> str:
    unit, size = next(((unit, size) for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= size), ("", 1))
    return f"{number / size:.3g} {unit}".strip()
