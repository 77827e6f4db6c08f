"""Batches that one worker reads and scatters: it offers what it has read, and the others pull it ahead of need."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...dependency import Spec


class Scatter(NamedTuple):
    """Who reads a batch, and who has what from there."""

    reader: int
    #: by the name of what is scattered: workers that use it and cannot read it
    takers: dict[str, list[int]]
    #: what is scattered, trees by microbatch: the reader has them, at the takers they arrive
    lists: dict[str, list[Any]]


def scatter_whole(spec: Spec, inputs: list[Any], targets: list[Any] | None) -> Scatter:
    """Return who has what of a batch that only the worker of the first stage can read: its users all of it."""
    reader = spec.place(0, 0)
    held = {worker: {stage for stage, _ in spec.hosted(worker)} for worker in range(spec.num_workers)}
    uses = {"inputs": (0, inputs)} | ({} if targets is None else {"targets": (spec.last_stage, targets)})
    return Scatter(
        reader,
        {what: [w for w in held if w != reader and stage in held[w]] for what, (stage, _) in uses.items()},
        {what: parts for what, (_, parts) in uses.items()},
    )
