"""The result of a step on a worker: the loss, put together from parts of the last stage's hosts; local outputs."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dependency import ConfigError
from ..transport.payload import Tree
from .modules.borders import without_views
from .modules.torch_internals import by_type

#: the argument by which Hugging Face's models divide a sum of losses: the number of labels in a whole batch
NUM_ITEMS = "num_items_in_batch"
#: label that losses of tokens ignore, in torch and Hugging Face alike
IGNORED = -100


class Loss(NamedTuple):
    """The loss of a microbatch: a scalar tensor, and its weight as a number or scalar tensor."""

    total: Tensor
    weight: Any
    #: whether the loss function gave a sum: gradients are then divided by the step's weight at the update
    summed: bool


def losses_tree(losses: Mapping[int, Loss]) -> Tree:
    """Return the part of losses by microbatch that all workers get. Stays on the device: no synchronisation.

    Numbers by microbatch travel as bytes: a tree of many values takes longer on its way than the rest of a step.
    """
    totals, weights = [loss.total for loss in losses.values()], [loss.weight for loss in losses.values()]
    if len({total.dtype for total in totals}) > 1:
        totals = [total.double() for total in totals]
    sums, summed = torch.stack(totals).double() if totals else torch.zeros(0), any(x.summed for x in losses.values())
    told = {"microbatches": array("q", losses).tobytes(), "sums": sums, "summed": summed}
    if not summed:
        return told  # means are weighted already
    are_trees = any(isinstance(weight, (Tensor, dict)) for weight in weights)
    return told | {"weights": weights if are_trees else array("d", weights).tobytes()}


def sum_and_weight(loss: Any, share: float) -> tuple[Tensor, Any]:
    """Return the result of a loss function: a tensor without dimensions, and its weight, `share` for a mean.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(loss, Tensor) and not loss.dim():  # as most are
        return loss, share
    found = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, share)
    total, weight = found
    is_number = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, Real)
    if not (isinstance(total, Tensor) and total.numel() == 1 and is_number):
        if isinstance(weight, MetricWeights):
            return total * total.new_tensor([share if each is None else 1 for each in weight.values()]), weight
        what = " and ".join(map(_shape, found if found is loss else (loss,)))
        raise ConfigError(f"loss_fn returned {what}: it must return a number as a tensor, or that and a weight")
    if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
        why = "loss_fn returned a weight that requires a gradient, and weights are added up as numbers"
        raise ConfigError(f"{why}: detach it")
    return total.reshape(()) if total.dim() else total, weight


class MetricWeights(dict[str, Any]):
    """The weights of several metrics by name; None of means."""


def _shape(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


class Result:
    """The result of a step, an evaluation or a prediction.

    Args:
        parts: of each host of the last stage: whether it was asked to stop, and the tree of its losses. All workers
            have the same parts, so all compute the same result.
        outputs: this worker's outputs of a prediction, by microbatch.
    """

    def __init__(self, parts: Iterable[Mapping[str, Any]], outputs: Mapping[int, Tree], rows: int = 0) -> None:
        self.parts = list(parts)
        #: of the whole batch
        self.rows = rows
        #: True if a host was asked to stop: all workers stop after the same step
        self.stop = any(part["stop"] for part in self.parts)
        #: True if a host was asked to rest: all workers of an elastic job rest after the same step
        self.rest = any("rest" in part for part in self.parts)
        self.outputs = {microbatch: without_views(tree) for microbatch, tree in outputs.items()}
        #: norm of all gradients, once it has arrived, if they are clipped
        self.norm_tensor: Tensor | None = None
        #: whether no gradient has overflowed, once it is known, if the loss was scaled
        self.finite_tensor: Tensor | None = None
        #: whether `skip_update` has left the update out
        self.skipped = False
        self.summed = any(part.get("summed", False) for part in self.parts)

    @cached_property
    def _numbers(self) -> list[tuple[float, float]]:
        """Sum and weight (1 of means) of every microbatch in order; waits for the device where they were made."""
        found: list[tuple[int, float, float]] = []
        for part in self.parts:
            if "sums" in part:
                microbatches, sums = array("q", part["microbatches"]), part["sums"].tolist()
                told = part.get("weights", [1.0] * len(sums))
                weights = array("d", told) if isinstance(told, bytes) else map(float, told)
                found += zip(microbatches, sums, weights, strict=True)
        return [(loss, weight) for _, loss, weight in sorted(found)]

    @property
    def known(self) -> tuple[Any, ...]:
        """The facts of a training step that all workers know: parts of the loss, norm, and whether all is finite."""
        return self.parts, self.norm_tensor, self.finite_tensor

    @property
    def norm(self) -> float | None:
        """Norm of all gradients before they were clipped; waits for the device."""
        return None if self.norm_tensor is None else float(self.norm_tensor)

    @property
    def divisor(self) -> float:
        """Divisor of summed gradients: the weight of the whole batch, or 1 if shares were applied."""
        return sum(weight for _, weight in self._numbers) if self.summed else 1.0

    @cached_property
    def loss(self) -> float | None:
        """Loss of the whole batch: sum over microbatches in their order, by weight; None without targets."""
        if not self._numbers:
            return None
        total = sum(loss for loss, _ in self._numbers)
        if not self.summed:
            return total  # means are weighted by shares of 1, which as floats need not add up to 1
        return total / self.divisor if self.divisor else float("nan")


def clips(max_norm: float | None, norm: Tensor) -> bool:
    """Return whether `torch.nn.utils.clip_grads_with_norm_` changes gradients of this norm; waits for the device."""
    return max_norm is not None and not bool(max_norm / (norm + 1e-6) >= 1.0)


def total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the total of these norms, with the bits of `torch.nn.utils.get_total_norm` of the whole model.

    Args:
        norms: each of the type of its tensor; torch adds up the norms of a type together.
    """
    grouped = [(norm.real if norm.is_complex() else norm).to(device) for group in by_type(norms) for norm in group]
    return torch.linalg.vector_norm(torch.stack(grouped)) if grouped else torch.tensor(0.0)
