"""The workers of this process, each with its device and its carrier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dependency import BatchError, ConfigError, Spec, check
from .launching.job import Job
from .workers.actor import WorkerActor
from .workers.compute.backends import backend_for, usual_device
from .workers.transport.carrier import Carrier
from .workers.transport.local import local_carriers

if TYPE_CHECKING:
    from .elastic import ElasticRun, Recovery
    from .model.batches.microbatches import Microbatches
    from .model.shard_maker import ShardMaker
    from .model.sharding import Sharing
    from .workers.compute.members import Members
    from .workers.compute.slices import Divide
    from .workers.compute.updating import Training


def checked_workers(spec: Spec, job: Job | None) -> list[int]:
    """Return the workers of this process, whose parts in the schedule can run."""
    workers = list(range(spec.num_workers)) if job is None else [job.worker]
    for worker in workers:
        check(spec, worker)
    return workers


def make_actors(
    job: Job | None, workers: Sequence[int], device: str | None, max_grad_norm: float | None, stall_s: float
) -> list[WorkerActor]:
    """Return the workers of this process, which have no shards yet."""
    if device is None:
        device = usual_device(job.processes_here if job else len(workers))
    backends = [backend_for(device, place) for place in ([job.place] if job else workers)]
    if len(backends) == 1:
        backends[0].use()  # of several each computes on a thread of its own
    carriers: Sequence[Carrier]
    if job:
        from .launching.joining import join
        from .launching.meeting_place import place_of

        carriers = [join(place_of(job))]
    else:
        carriers = local_carriers(len(workers))
    for carrier, backend in zip(carriers, backends, strict=True):
        carrier.post.use_device(backend.way())
    made = zip(carriers, backends, strict=True)
    return [WorkerActor(*parts, {}, max_grad_norm=max_grad_norm, stall_s=stall_s) for parts in made]


def elasticity(spec: Spec, job: Job | None, training: Training) -> Callable[[ElasticRun, ShardMaker], Recovery] | None:
    """Return the call that makes an elastic job's recovery when shards are made; None: the job is not elastic.

    Raises:
        ConfigError: it cannot go on without a worker.
    """
    if job is None or not job.elastic:
        return None
    from .elastic import Recovery, refuse_inelastic  # few jobs are

    refuse_inelastic(spec, job, training)
    return partial(Recovery, job)


def make_members(
    job: Job | None, sharing: Sharing | None, device: torch.device
) -> tuple[Members | None, Divide | None]:
    """Return this process among the members of its worker, and how they divide layers; None: it is alone."""
    if job is None or sharing is None or job.members == 1:
        return None, None
    from .launching.joining import mesh_of_members
    from .workers.compute.members import Members

    mesh = mesh_of_members(job, device.type)
    return Members(mesh, sharing.rows, sharing.per_microbatch), sharing.divide(mesh)


def own_rows(batch: Microbatches, members: Members) -> Microbatches:
    """Return the microbatches of a batch that this member computes.

    Raises:
        BatchError: they cannot be divided among members, or only one worker could read them.
    """
    if not members.rows:
        return batch
    if batch.scatter is not None:
        raise BatchError(f"members={members.count}: {batch.scatter.reader} alone can read a batch; let all workers")
    if len(batch.inputs) % members.count:
        raise BatchError(
            f"members={members.count}: a batch makes {len(batch.inputs)} microbatches, and each member needs as many; "
            "give the batch more rows"
        )
    sides = batch.inputs, batch.targets, batch.shares
    inputs, targets, shares = (list(side[members.index :: members.count]) for side in sides)
    return replace(batch, inputs=inputs, targets=targets, shares=shares)


def parameter_groups(actors: Sequence[WorkerActor]) -> list[dict[str, Any]]:
    """Return the groups of all optimizers of these workers."""
    optimizers = [shard.optimizer for actor in actors for shard in actor.shards.values()]
    return [group for optimizer in optimizers if optimizer is not None for group in optimizer.param_groups]


def set_rate(actors: Sequence[WorkerActor], rate: float) -> None:
    """Set the learning rate of every group."""
    for group in parameter_groups(actors):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def sum_buffers(actor: WorkerActor, names: Collection[str], num_routes: int) -> None:
    """Let buffers of these names be their sums over the replicas of their stage, added in the order of replicas.

    Raises:
        ConfigError: no module has a buffer of one of these names.
    """
    own = {
        (stage, route, f"{place}.{name}"): buffer
        for (stage, route), shard in actor.shards.items()
        for place, module in enumerate(shard.slice.own)
        for name, buffer in module._buffers.items()
        if name in names and buffer is not None
    }
    # Copies: workers that are threads would read what others have written already.
    copies = {f"{stage}/{route}/{name}": buffer.clone() for (stage, route, name), buffer in own.items()}
    told = {key: copy for each in actor.exchange("buffers to sum", copies) for key, copy in each.items()}
    if missing := set(names) - {key.rpartition(".")[2] for key in told}:
        raise ConfigError(f"modify: summed={min(missing)!r}: no module has a buffer of that name")
    for (stage, _, name), buffer in own.items():
        buffer.copy_(reduce(torch.add, [told[f"{stage}/{route}/{name}"] for route in range(num_routes)]))
