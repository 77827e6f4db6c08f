"""The values of held-out batches: metrics in the place of the loss."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .dependency import ConfigError
from .model.shard_maker import refuse_sums
from .workers.compute.result import MetricWeights, Result, sum_and_weight
from .workers.compute.shard import LossFn, Shard


@contextmanager
def with_metric(shards: Callable[[], Iterable[Shard]], metric: LossFn | None) -> Iterator[None]:
    """Return a context that lets the last stage compute `metric` instead of the loss; None: the loss.

    Args:
        shards: returns the shards of this process, which may have more of them on leaving.
    """
    refuse_sums(metric, "metric")
    if callable(getattr(metric, "compute", None)):
        why = f"metric: {type(metric).__name__} computes its value from all rows, and evaluate takes a mean"
        raise ConfigError(f"{why}; update it by what `predict` returns, or pass a function of (sum, weight)")
    last = {} if metric is None else {shard: shard.loss_fn for shard in shards() if shard.loss_fn is not None}

    def measured(output: Any, target: Any) -> Any:
        assert metric is not None
        found = metric(output, target)
        return several(found) if isinstance(found, Mapping) else as_loss(found)

    try:
        for shard in last:
            shard.loss_fn = measured
        yield
    finally:
        for shard in shards() if last else ():
            if shard.loss_fn is measured:
                shard.loss_fn = last.get(shard) or next(iter(last.values()))


def several(found: Mapping[str, Any]) -> tuple[Tensor, MetricWeights]:
    """Return a metric of several values, each a mean or (sum, weight): their numbers, and weights; None of means.

    Raises:
        ConfigError: there is none, or one is no number.
    """
    if not found or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"metric returned {dict(found)!r}: its names must be texts, at least one")
    pairs = {name: sum_and_weight(as_loss(each), 1.0) for name, each in found.items()}
    device = next((total.device for total, _ in pairs.values() if not total.is_cpu), None)
    totals = torch.stack([total.detach().to(device, torch.float64) for total, _ in pairs.values()])
    weights = {name: pairs[name][1] if isinstance(each, tuple) else None for name, each in found.items()}
    return totals, MetricWeights(weights)


def as_loss(found: Any) -> Any:
    """Return a metric's value in the form of a loss: a tensor, or (tensor, weight)."""
    return (torch.as_tensor(found[0]), *found[1:]) if isinstance(found, tuple) else torch.as_tensor(found)


def measured(result: Result) -> dict[str, tuple[float, float]]:
    """Return value and weight by the name of a metric, which is "" of a loss, or of a metric that is one number.

    Raises:
        ConfigError: a metric has given other names for other microbatches.
    """
    weights = [weight for part in result.parts for weight in part.get("weights", ())]
    if not weights or not isinstance(weights[0], dict):
        assert result.loss is not None
        return {"": (result.loss, result.divisor if result.summed else result.rows)}
    if any(list(each) != list(weights[0]) for each in weights):
        raise ConfigError("metric: returned other names for another microbatch; return the same for all")
    return {name: measured(_one(result, place, name))[""] for place, name in enumerate(weights[0])}


def _one(result: Result, place: int, name: str) -> Result:
    """Return the result of one of several metrics."""
    parts = []
    for part in result.parts:
        if "weights" in part:
            weights = [each[name] for each in part["weights"]]
            part = {**part, "sums": part["sums"][:, place], "weights": weights, "summed": weights[0] is not None}
            if not part["summed"]:
                del part["weights"]
        parts.append(part)
    return Result(parts, {}, result.rows)
