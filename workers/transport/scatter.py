"""Batches that one worker reads and scatters: it offers the read tensors, and other workers pull them ahead of need."""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ...dependency import F, Spec


class Scatter(NamedTuple):
    """The reader of a batch, and the parts that other workers get from it."""

    reader: int
    #: by the name of a part: workers that use it and cannot read it
    takers: dict[str, list[int]]
    #: the parts, trees by microbatch: the reader has them, at the takers they arrive
    lists: dict[str, list[Any]]

    def parts_for(self, worker: int) -> set[str]:
        """Return the names of the parts that `worker` gets."""
        return {what for what, takers in self.takers.items() if worker in takers}


def scatter_whole(
    spec: Spec, inputs: list[Any], targets: list[Any] | None, *, reads: bool, to_all: bool = False
) -> Scatter:
    """Return the distribution of a batch that only the worker of the first stage can read.

    Args:
        reads: whether this worker is the reader; elsewhere the lists are filled on arrival.
        to_all: whether all workers use inputs, and not the workers of the first stage alone.
    """
    reader = spec.place(0, 0)
    scatter = Scatter(reader, {}, {})
    for worker in (each for each in spec.workers if each != reader):
        held = {stage for stage, _ in spec.hosted(worker)}
        sides = ("inputs", inputs, to_all or 0 in held), ("targets", targets, spec.last_stage in held)
        for what, parts, takes in sides:
            if parts is not None and takes:
                scatter.takers[f"{what} for worker {worker}"] = [worker]
                scatter.lists[f"{what} for worker {worker}"] = run_by(spec, worker, parts) if reads else parts
    return scatter


def run_by(spec: Spec, worker: int, parts: list[Any]) -> list[Any]:
    """Return trees by microbatch, with None for microbatches of other replicas."""
    if spec.num_routes == 1:
        return parts
    runs = _runs(replace(spec, num_microbatches=len(parts)), worker)
    return [part if here else None for part, here in zip(parts, runs, strict=True)]


@lru_cache(maxsize=16)
def _runs(spec: Spec, worker: int) -> list[bool]:
    """Return by microbatch whether `worker` runs it."""
    stages = {stage for stage, _ in spec.carried(worker)}
    return [any(spec.worker(F(stage, m)) == worker for stage in stages) for m in range(spec.num_microbatches)]
