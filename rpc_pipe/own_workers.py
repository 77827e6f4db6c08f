"""The workers of this process, each with its device and its carrier; the summary of their run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .dependency import Spec, check, check_all
from .dependency.pipeline_options import Options
from .launching.job import Job
from .workers.actor import WorkerActor
from .workers.compute.devices.backends import backend_for, usual_device
from .workers.transport.carrier import Carrier
from .workers.transport.local import local_carriers

if TYPE_CHECKING:
    from .boards.view import View
    from .elastic.recovery import Recovery
    from .model.shard_maker import ShardMaker
    from .session import Session


def checked_workers(spec: Spec, job: Job | None) -> list[int]:
    """Return the workers of this process; check that their parts of the schedule can run."""
    if job is None:
        check_all(spec)
        return list(range(spec.num_workers))
    check(spec, job.worker)
    return [job.worker]


def make_actors(
    job: Job | None, workers: Sequence[int], max_grad_norm: float | None, options: Options
) -> list[WorkerActor]:
    """Return the workers of this process, which have no shards yet."""
    if (device := options.device) is None:
        device = usual_device(job.processes_here if job else len(workers))
    backends = [backend_for(device, place) for place in ([job.place] if job else workers)]
    if len(backends) == 1:
        backends[0].use()  # several workers compute on a thread each, which calls it
    carriers: Sequence[Carrier]
    if job:
        from .launching.meeting_place import join, place_of

        carriers = [join(place_of(job))]
    else:
        carriers = local_carriers(len(workers))
    for carrier, backend in zip(carriers, backends, strict=True):
        carrier.post.use_device(backend.way())
    made = zip(carriers, backends, strict=True)
    return [WorkerActor(*parts, {}, max_grad_norm=max_grad_norm, options=options) for parts in made]


def run_result(view: View) -> dict[str, Any] | None:
    """Return the summary of a run at its end, which prices its schedule: `tracing.run_summary.result_of`."""
    from .tracing.run_summary import result_of

    return result_of(view)


def elasticity(job: Job | None) -> Callable[[Session, ShardMaker], Recovery] | None:
    """Return the call that makes an elastic job's recovery when shards are made; None: the job is not elastic."""
    if job is None or not job.elastic:
        return None
    from .elastic.recovery import Recovery  # few jobs are

    return partial(Recovery, job)
