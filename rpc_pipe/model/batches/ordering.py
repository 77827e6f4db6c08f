"""The order of a training step's microbatches, by their predicted times."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...dependency import Action, BatchError, ConfigError, Spec
from ...workers.transport.payload import Tree, tensors_of
from .microbatches import Microbatches

#: (model's arguments of a microbatch) -> predicted seconds of its forward and backward on a worker, or on each stage;
#: or a profile
MicrobatchCost = Callable[..., float | Sequence[float]] | str | Path | Mapping[str, Any]


class Ordering:
    """Measures the microbatches of a step, and puts them into another order before they get their numbers.

    So the schedule, the keys of random numbers and the sums follow the order that runs. All workers find the same
    order, as it depends on the batch alone.

    Args:
        order: (spec, times of microbatches, predicted seconds of the step or 0, times by action if known) -> order.
        cost: called as the model is, with a microbatch, or of a profile by rows and length; None: the tokens of a
            microbatch, or the elements of its first tensor.
        is_called: whether the inputs of a microbatch are (args, kwargs); else they are the only argument.
    """

    def __init__(
        self,
        order: Callable[..., list[int]],
        cost: Any,
        is_called: bool,
    ) -> None:
        self._order, self._cost, self._is_called = order, cost, is_called
        #: (rows, length) -> predicted seconds, if known
        self.seconds: Callable[[int, int], float] | None = getattr(cost, "seconds", None)

    def applied(self, spec: Spec, found: Microbatches) -> Microbatches:
        """Return the microbatches in the order of their run.

        Args:
            spec: over whole sequences.

        Raises:
            BatchError: a microbatch has no tensor on this worker, so that its size is unknown.
            ConfigError: the cost of a microbatch is no time.
        """
        # The rows of a lazy batch without sizes are equal.
        if found.lazy is not None and found.sizes is None:
            return found
        sizes: Sequence[tuple[int, ...]] = found.sizes or []
        if not sizes and (self._cost is None or self.seconds is not None):
            sizes = [_size(*numbered) for numbered in enumerate(found.inputs)]
        order = self._found(spec, found.inputs, sizes)
        if order == sorted(order):
            return found
        sides: tuple[list[Any], ...] = found.inputs, found.targets, found.shares
        inputs, targets, shares = ([side[number] for number in order] for side in sides)
        return replace(found, inputs=inputs, targets=targets, shares=shares, order=tuple(order))

    def _found(self, spec: Spec, inputs: Sequence[Tree], sizes: Sequence[tuple[int, ...]]) -> list[int]:
        if len(inputs) < 2:
            return list(range(len(inputs)))
        if self._cost is None:
            return self._order(spec, [float(math.prod(size)) for size in sizes])
        if self.seconds is not None:
            times = [self.seconds(rows, length) for rows, length, *_ in ((*size, 1, 1) for size in sizes)]
            return self._order(spec, times, sum(times))
        by_stage = [self._times(spec.num_stages, *numbered) for numbered in enumerate(inputs)]
        times = [sum(each) / len(each) for each in by_stage]

        def relative(action: Action, number: int) -> float:
            return by_stage[number][action.stage % len(by_stage[number])]

        return self._order(spec, times, sum(times), relative)

    def _times(self, num_stages: int, number: int, inputs: Tree) -> list[float]:
        """Return the predicted seconds of a microbatch on a worker, or on each stage."""
        args, kwargs = inputs if self._is_called else ((inputs,), {})
        try:
            found: Any = self._cost(*args, **kwargs)
        except Exception as error:
            raised = f"microbatch_cost: raised {type(error).__name__} for microbatch {number}: {error}"
            raise ConfigError(f"{raised}; must be callable as the model is, and return seconds") from error
        times = list(found) if isinstance(found, (list, tuple)) else [found]
        numbers = [isinstance(t, (int, float)) and not isinstance(t, bool) and 0 <= t < math.inf for t in times]
        if len(times) not in (1, num_stages) or not all(numbers):
            raise ConfigError(f"microbatch_cost={found!r}: of microbatch {number}; must be seconds, 1 or {num_stages}")
        return times


def _size(number: int, inputs: Tree) -> tuple[int, ...]:
    """Return the shape of the first tensor of a microbatch: its tokens, or (rows, length, ...)."""
    first = next(iter(tensors_of(inputs)), None)
    if first is None:
        fix = "pass inputs to every worker, or lengths= to a Loader"
        raise BatchError(f"microbatch_order=balanced: microbatch {number} has no tensor on this worker; {fix}")
    return tuple(first.shape)
