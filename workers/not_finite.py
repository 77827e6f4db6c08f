"""The end of a step whose labels count otherwise in each microbatch, or whose loss is not finite, maybe as none do."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..dependency import NotFinite
from .compute.result import IGNORED, NUM_ITEMS, Result
from .step import Context, Step
from .transport.payload import Tree

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
        fix = "go on from a checkpoint of before; torch.autograd.set_detect_anomaly(True) shows the cause"
        why = f"as {cause}" if cause else f"and {spoilt}: {fix}; RPC_PIPE_NAN=warn goes on (--nan warn)"
        raise NotFinite(f"step {number}: the loss is {loss}, {why}")
    if worker.nan == "warn" and worker.worker == min(worker.mailbox.carrier.workers):
        logger.warning("step %d: the loss is %s", number, loss)


def report_weights(worker: Context, step: Step, result: Result) -> None:
    """Warn if means over labels count by rows, and microbatches have other shares of the labels than of the rows.

    Also warn if weights of sums are no counts: many loops return (loss, accuracy).
    """
    data, spec = step.batch.data, step.batch.spec
    if worker.worker != spec.place(spec.last_stage, 0):
        return
    if result.summed:
        if result.divisor < len(data.shares) < data.rows:
            logger.warning(
                "loss_fn: a pair is (sum, weight), and the weights of %d rows add up to %g: return the loss alone if "
                "the second number is a metric, such as an accuracy", data.rows, result.divisor,
            )  # fmt: skip
        return
    if sum(data.shares) > 1.5:
        return
    sides = zip(data.inputs, data.targets or (), strict=True)
    counts = [sum(int((each != IGNORED).sum()) for each in _labels(side) if not each.is_meta) for side in sides]
    mean = sum(counts) / sum(data.shares)
    if any(abs(count - share * mean) > 1e-3 for count, share in zip(counts, data.shares, strict=True)):
        logger.warning(
            "loss: microbatches have %d to %d labels besides %d, and a mean counts by rows, so the loss is not that of "
            "the whole batch: put %s into the batch for a model that divides by it, or return (sum, weight) from a "
            "loss_fn", min(counts), max(counts), IGNORED, NUM_ITEMS,
        )  # fmt: skip


def unlabelled(inputs: Sequence[Tree], targets: Sequence[Tree]) -> str:
    """Return a sentence about the microbatches without a counted label; "" if there are none."""
    found = [str(m) for m, each in enumerate(zip(inputs, targets, strict=True)) if any(map(_is_empty, _labels(each)))]
    if not found:
        return ""
    which = f"microbatch {found[0]} are" if len(found) == 1 else f"microbatches {', '.join(found)} are"
    fix = f"put {NUM_ITEMS} into the batch, return (sum, weight) from a loss_fn, or take fewer microbatches"
    return f"all labels of {which} {IGNORED}, and a mean over none is no number: {fix}"


def _labels(side: Any, name: str = "") -> list[Tensor]:
    """Return the labels in a microbatch's (inputs, targets): tensors of that name, and targets of a loss function."""
    if isinstance(side, Tensor):
        return [side] if name == "labels" else []
    parts: Any = side.items() if isinstance(side, dict) else ()
    if isinstance(side, (tuple, list)):
        parts = [("labels" if place == 1 else name, each) for place, each in enumerate(side)]
    return [labels for key, each in parts for labels in _labels(each, str(key))]


def _is_empty(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_meta) and bool((labels == IGNORED).all())
