"""The members of this process's worker, and their rows of a batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .dependency import BatchError
from .dependency.parallelism import FSDP, FSDP_KEPT
from .launching.job import Job
from .launching.joining import mesh_of_members
from .model.batches.microbatches import Microbatches
from .model.sharding import Sharing
from .workers.compute.members import Members
from .workers.compute.slices import Divide


def make_members(job: Job, sharing: Sharing, device: torch.device) -> tuple[Members, Divide]:
    """Return this process among the members of its worker, and their function to divide layers."""
    identity = ""
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        identity = str(getattr(properties, "uuid", device))
    mesh = mesh_of_members(job, device.type, identity)
    kept = sharing.shard == FSDP_KEPT if sharing.shard in FSDP else None
    members, divide = Members(mesh, sharing.planes, sharing.per_microbatch, kept), sharing.divide(mesh)

    def divided(module: nn.Module, name: str, model: nn.Module) -> Any:
        made = divide(module, name, model)
        if kept is None and "torch.distributed.fsdp" in sys.modules:
            from .workers.compute.fsdp import sum_over_rows

            sum_over_rows(made or module, {rank: n // members.alike for n, rank in enumerate(members.ranks)})
        return made

    return members, divided


def own_rows(batch: Microbatches, members: Members) -> Microbatches:
    """Return the microbatches of a batch that this member computes.

    Raises:
        BatchError: they cannot be divided among members, or only one worker could read them.
    """
    if not members.rows:
        return batch
    if batch.scatter is not None:
        raise BatchError(f"members={members.count}: {batch.scatter.reader} alone can read a batch; let all workers")
    microbatches = range(len(batch.inputs) // members.slices)
    if len(microbatches) % members.shares:
        raise BatchError(
            f"members={members.count}: a batch makes {len(microbatches)} microbatches, and each member needs as many; "
            "give the batch more rows"
        )
    own = [members.in_whole(index, members.part) for index in range(len(batch.inputs) // members.shares)]
    inputs, targets, shares = ([side[index] for index in own] for side in (batch.inputs, batch.targets, batch.shares))
    places = None if batch.places is None else [batch.places[index] for index in own]
    return replace(batch, inputs=inputs, targets=targets, shares=shares, places=places)
