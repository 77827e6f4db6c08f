"""The members of this process's worker, and their rows of a batch."""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .dependency import BatchError, ConfigError
from .dependency.declared import FSDP, FSDP_KEPT
from .launching.job import Job
from .launching.meeting_place import mesh_of_members
from .model.batches.microbatches import Microbatches
from .model.sharding import Sharing
from .workers.compute.parts.divided import read_whole_numbers
from .workers.compute.parts.members import Members
from .workers.compute.sequences.slices import Divide


def make_members(job: Job, sharing: Sharing, device: torch.device) -> tuple[Members, Divide]:
    """Return this process among the members of its worker, and their function to divide layers."""
    identity = ""
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        identity = str(getattr(properties, "uuid", device))
    mesh = mesh_of_members(job, device.type, identity)
    read_whole_numbers()
    kept = sharing.shard == FSDP_KEPT if sharing.shard in FSDP else None
    members, divide = Members(mesh, sharing.planes, sharing.per_microbatch, kept), dividing(sharing, mesh)

    def divided(module: nn.Module, name: str, model: nn.Module) -> Any:
        made = divide(module, name, model)
        if kept is None and "torch.distributed.fsdp" in sys.modules:
            from .workers.compute.parts.fsdp import sum_over_rows

            sum_over_rows(made or module, {rank: n // members.alike for n, rank in enumerate(members.ranks)})
        return made

    return members, divided


def dividing(sharing: Sharing, mesh: Any) -> Divide:
    """Return the function that divides a layer or block among the members of a mesh."""
    function = _of_kind(sharing, mesh)

    def divide(module: nn.Module, name: str, model: nn.Module) -> Any:
        before = {each: parameter.grad_dtype for each, parameter in module.named_parameters()}
        made = function(module, name, model)
        for each, parameter in (module if made is None else made).named_parameters():
            if before.get(each, parameter.grad_dtype) != parameter.grad_dtype:
                why = f"grad_dtype={before[each]} of {each}: members divide it, and gradients have its type"
                raise ConfigError(f"{why}; leave grad_dtype out")
        return made

    return divide


def _of_kind(sharing: Sharing, mesh: Any) -> Divide:
    if sharing.shard in FSDP:
        from .workers.compute.parts.fsdp import divide

        return lambda module, name, model: divide(module, mesh, sharing.policy)
    if sharing.shard == "tp":
        from .workers.compute.parts.tensor_parallel import divide_by_plan

        return partial(divide_by_plan, mesh)
    function = sharing.shard
    assert callable(function)
    return lambda module, name, model: function(module, mesh)


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
        made = f"a batch makes {len(microbatches)} microbatches, and each member needs as many"
        raise BatchError(f"members={members.count}: {made}; give the batch more rows")
    own = [members.in_whole(index, members.part) for index in range(len(batch.inputs) // members.shares)]
    inputs, targets, shares = ([side[index] for index in own] for side in (batch.inputs, batch.targets, batch.shares))
    places = None if batch.places is None else [batch.places[index] for index in own]
    return replace(batch, inputs=inputs, targets=targets, shares=shares, places=places)
