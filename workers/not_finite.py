"""The end of a step with a loss that is not finite."""

from __future__ import annotations

import logging

from ..dependency import NotFinite
from .compute.result import Result
from .compute.unlabelled import unlabelled
from .context import Context
from .step import Step

logger = logging.getLogger(__name__)


def report(worker: Context, step: Step, result: Result) -> None:
    """Stop, or warn: every worker finds the same, so one reports. A scaler continues while it can shrink its scale.

    Raises:
        NotFinite: all stop here.
    """
    loss, spoilt, number = result.loss, "the weights are spoilt by it", step.ordinal
    cause = unlabelled(step.batch.data.inputs, step.batch.data.targets or ())
    scale = next(iter(worker.shards.values())).updating.scale
    if scale.enabled:  # an update by such gradients is left out, unless it never ends
        spoilt = "" if scale.scale else "grad_scaler has come down to 0"
    elif result.skipped or (step.batch.skips is not None and not step.batch.updates):
        spoilt = ""
    if worker.nan == "stop" and spoilt:
        raise NotFinite(
            f"step {number}: the loss is {loss}, as {cause}"
            if cause
            else f"step {number}: the loss is {loss}, and {spoilt}: go on from a checkpoint of "
            "before; torch.autograd.set_detect_anomaly(True) shows where it comes from; RPC_PIPE_NAN=warn goes on "
            "(in a job: rpc-pipe run --nan warn)"
        )
    if worker.nan == "warn" and worker.worker == min(worker.mailbox.carrier.workers):
        logger.warning("step %d: the loss is %s", number, loss)
