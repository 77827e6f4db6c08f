"""Batches that one worker reads and scatters: it offers what it has read, and the others pull it ahead of need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ...dependency import Spec


class Scatter(NamedTuple):
    """Who reads a batch, and who has what from there."""

    reader: int
    #: by the name of what is scattered: workers that use it and cannot read it
    takers: dict[str, list[int]]
    #: what is scattered, trees by microbatch: the reader has them, at the takers they arrive
    lists: dict[str, list[Any]]


def scatter_whole(
    spec: Spec, inputs: list[Any], targets: list[Any] | None, *, reads: bool, to_all: bool = False
) -> Scatter:
    """Return who has what of a batch that only the worker of the first stage can read.

    Args:
        reads: whether that is this worker; at the others the lists are filled.
        to_all: whether all workers use inputs, and not those of the first stage alone.
    """
    reader = spec.place(0, 0)
    scatter = Scatter(reader, {}, {})
    for worker in (each for each in range(spec.num_workers) if each != reader):
        held = {stage for stage, _ in spec.hosted(worker)}
        for what, parts, takes in (
            ("inputs", inputs, to_all or 0 in held),
            ("targets", targets, spec.last_stage in held),
        ):
            if parts is not None and takes:
                scatter.takers[f"{what} for worker {worker}"] = [worker]
                scatter.lists[f"{what} for worker {worker}"] = run_by(spec, worker, parts) if reads else parts
    return scatter


def run_by(spec: Spec, worker: int, parts: list[Any]) -> list[Any]:
    """Return trees by microbatch, with None in place of those that only other replicas run."""
    if spec.num_routes == 1:
        return parts
    spec = replace(spec, num_microbatches=len(parts))
    routes = {route for _, route in spec.hosted(worker)}
    return [part if spec.route(number) in routes else None for number, part in enumerate(parts)]
