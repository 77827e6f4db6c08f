"""Evaluation of a batch, or of the batches of a loader."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .checkpoints.resumption import Skipped
from .dependency import BatchError
from .held_out import measured
from .model.batches.loaders import CouldBeOne, has_batches
from .session import Session
from .workers.compute.shard import LossFn
from .workers.not_finite import unlabelled
from .workers.transport.payload import Tree, tensors_of


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
    found = measured(result)
    if metric is None and not result.summed and (items := cut.num_items) is not None:
        found = {"": (found[""][0], items)}
    if metric is None and math.isnan(found[""][0]) and (cause := unlabelled(cut.inputs, cut.targets)):
        raise BatchError(f"evaluate: the loss is nan, as {cause}")
    if session.recovery is not None:
        session.recovery.write_down(found)
    return found


def is_loader(given: Any, known: Any, could_be_one: CouldBeOne) -> bool:
    """Return whether `given` is iterated over for batches, as a DataLoader or a list of batches.

    Args:
        known: the form of a batch that was taken before; None: there was none.

    Raises:
        BatchError: it may be one batch or several.
    """
    found = has_batches(given, known, could_be_one)
    if found is None:
        rows = [{tensor.shape[0] for tensor in tensors_of(each) if tensor.dim()} for each in given]
        if any(len(sizes) != 1 for sizes in rows) or len(set.union(*rows)) == 1:
            what = f"a {type(given).__name__} of {len(given)} may be one batch or a list of batches"
            raise BatchError(f"batch: {what}; pass iter(batches), or for one microbatches=[batch]")
        found = True  # as a shorter last batch
    return found


def mean_over(found: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Return the mean of (value, weight) pairs by name; nan if the weights are 0.

    Raises:
        BatchError: there is none, or names differ.
    """
    batches = list(found)
    if not batches:
        raise BatchError("loader: gave no batch: a generator can be used once, so make it anew for each call")
    if any(each.keys() != batches[0].keys() for each in batches):
        raise BatchError("metric: returned other names for another batch; return the same for all")
    return {name: _mean([each[name] for each in batches]) for name in batches[0]}


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    if len(pairs) == 1:
        return pairs[0][0]  # with its bits
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs if weight) / total if total else float("nan")
