"""The features of a job, each with its text as typed, for the table of pairs that are refused. Loads without torch."""

from __future__ import annotations

from typing import Any

from ..dependency import Order, Spec
from ..model.sharding import Sharing
from ..schedules import name_of

#: options of `Training` that some features exclude
_OF_TRAINING = ("accumulate", "deferred_batch_norm", "log_grad_norm", "post_validation")


def refuse_job(
    spec: Spec,
    sharing: Sharing,
    order: Order | None,
    training: Any = None,
    job: Any = None,
    is_launched: bool = True,
) -> None:
    """Refuse options that cannot be combined, or not with the schedule.

    Args:
        training, job: a `Training` and a `Job`; None: not known yet.
        is_launched: whether `rpc-pipe run` has started the job's processes.

    Raises:
        ConfigError: there is such a pair.
    """
    schedule = f"schedule={name_of(spec)}"
    zero = spec.parallelism.zero
    given = {
        "asynchronous": "" if spec.synchronous else schedule,
        "updates in parts": "" if spec.takes_steps else schedule,
        "members": f"members={sharing.count}" if sharing.count > 1 else "",
        "order=ready": f"order={order}" if order == "ready" else "",
        "zero": f"zero={zero}" if zero else "",
    }
    if training is not None:
        usual, scaler = type(training)(), training.grad_scaler
        found = {name: getattr(training, name) for name in _OF_TRAINING}
        given |= {name: f"{name}={value}" for name, value in found.items() if value and value != getattr(usual, name)}
        given["skip_update"] = "" if training.skip_update is None else "skip_update"
        given["grad_scaler"] = "grad_scaler" if scaler is not None and scaler.is_enabled() else ""
        given["no norm"] = "" if training.measures_norm else "max_grad_norm=None"
    if job is not None and job.elastic:
        given |= {"elastic": "--elastic", "no launcher": "" if is_launched else "torchrun"}
        given["carrier"] = "" if job.transport == "zmq" else f"transport={job.transport}"
        given["one replica"] = "replicas=1" if spec.num_routes == 1 else ""
    if sum(map(bool, given.values())) > 1:
        from ..dependency.crossings import refuse_together  # most jobs have one feature at most

        refuse_together(given)
