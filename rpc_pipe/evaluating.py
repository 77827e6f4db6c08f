"""Evaluation of a batch, or of the batches of a loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .checkpoints.resumption import Skipped
from .dependency import BatchError
from .model.batches.loaders import is_loader, mean_over
from .session import Session
from .workers.compute.shard import LossFn
from .workers.compute.unlabelled import unlabelled
from .workers.transport.payload import Tree


def evaluate(
    session: Session,
    batch: Any,
    microbatches: Sequence[Tree] | None,
    metric: LossFn | None,
    progress: Callable[[int], object] | None,
) -> float | dict[str, float]:
    """Return the loss of a batch or loader, or its metric or metrics; arguments as of `Pipeline.evaluate`."""
    is_one = microbatches is not None or not is_loader(batch, session.form, session.partition.could_be_one)
    found = []
    for each in [batch] if is_one else batch:
        found.append(_measured(session, each, microbatches, metric))
        if progress is not None:
            progress(len(found))
    means = mean_over(found)
    if "" not in means:
        return means
    return Skipped(means[""]) if session.results.behind and metric is not None else means[""]


def _measured(
    session: Session, batch: Tree | None, microbatches: Sequence[Tree] | None, metric: LossFn | None
) -> dict[str, tuple[float, float]]:
    """Return the loss of a batch, or its metrics by name, each with its weight among batches."""
    pair = None if metric is None else session.partition.pair_for_metric
    cut = session.cut(batch, microbatches, pair, whole=True)
    if session.results.behind:
        cut.finished()
        return session.results.evaluated()
    result = session.evaluate(cut, metric)
    found = result.measured
    if metric is None and not result.summed and (items := cut.num_items) is not None:
        found = {"": (found[""][0], items)}
    if metric is None and math.isnan(found[""][0]) and (cause := unlabelled(cut.inputs, cut.targets)):
        raise BatchError(f"evaluate: the loss is nan, as {cause}")
    if session.recovery is not None:
        session.recovery.write_down(found)
    return found
