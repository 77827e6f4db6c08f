"""Batches that one worker reads for others: it offers what it has read, and they pull it ahead of need."""

from __future__ import annotations

from typing import NamedTuple

from ..dependency import Spec


class Lending(NamedTuple):
    """Who reads a batch, and who has what from there."""

    reader: int
    #: by `inputs` and `targets`: workers that use them and cannot read them
    takers: dict[str, list[int]]


def lending(spec: Spec) -> Lending:
    """Return who has what of a batch that only the worker of the first stage can read."""
    reader = spec.place(0, 0)
    held = {worker: {stage for stage, _ in spec.hosted(worker)} for worker in range(spec.num_workers)}
    uses = {"inputs": 0, "targets": spec.last_stage}
    return Lending(
        reader, {what: [w for w in held if w != reader and stage in held[w]] for what, stage in uses.items()}
    )
