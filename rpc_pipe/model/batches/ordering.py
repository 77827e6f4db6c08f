"""The order in which the microbatches of a training step run, by their predicted times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...dependency import BatchError, ConfigError, Spec
from ...workers.transport.payload import Tree, tensors_of
from .microbatches import Microbatches

#: (model's arguments of a microbatch) -> predicted seconds of its forward and backward on a worker; or a profile
MicrobatchCost = Callable[..., float] | str | Path | Mapping[str, Any]


class ByLength(Protocol):
    """Predicts the seconds of a microbatch by its rows and their length."""

    def seconds(self, rows: int, length: int, /) -> float: ...


class Ordering:
    """Puts the microbatches of a step into another order, before they get their numbers.

    So the schedule, the keys of random numbers and the sums follow the order that runs. All workers find the same
    order, as it depends on the batch alone.

    Args:
        order: (spec, times of microbatches, predicted seconds of the step or 0) -> their order.
        cost: called as the model is, with a microbatch, or of a profile by rows and length; None: the tokens of a
            microbatch, or the elements of its first tensor.
        is_called: whether the inputs of a microbatch are (args, kwargs); else they are the only argument.
    """

    def __init__(
        self,
        order: Callable[[Spec, Sequence[float], float], list[int]],
        cost: Callable[..., float] | ByLength | None,
        is_called: bool,
    ) -> None:
        self._order, self._cost, self._is_called = order, cost, is_called
        #: (rows, length) -> predicted seconds, if known
        self.seconds: Callable[[int, int], float] | None = getattr(cost, "seconds", None)

    def applied(self, spec: Spec, found: Microbatches) -> Microbatches:
        """Return the microbatches in the order in which they will run.

        Args:
            spec: over whole sequences.

        Raises:
            BatchError: a microbatch has no tensor on this worker, so that its size is unknown.
            ConfigError: the cost of a microbatch is no time.
        """
        # The rows of a lazy batch without sizes are equal.
        if (found.lazy is not None and found.sizes is None) or len(found.inputs) < 2:
            return found
        if found.sizes is not None and (self._cost is None or self.seconds):
            each = self.seconds or (lambda rows, length: float(rows * length))
            times = [each(*size) for size in found.sizes]
        else:
            times = [self._time(number, inputs) for number, inputs in enumerate(found.inputs)]
        order = self._order(spec, times, 0.0 if self._cost is None else sum(times))
        if order == sorted(order):
            return found
        sides: tuple[list[Any], ...] = found.inputs, found.targets, found.shares
        inputs, targets, shares = ([side[number] for number in order] for side in sides)
        return replace(found, inputs=inputs, targets=targets, shares=shares, order=tuple(order))

    def _time(self, number: int, inputs: Tree) -> float:
        if self._cost is None or self.seconds is not None:
            first = next(iter(tensors_of(inputs)), None)
            if first is None:
                raise BatchError(
                    f"microbatch_order=balanced: microbatch {number} has no tensor on this worker; pass inputs to "
                    "every worker, or leave microbatch_order out"
                )
            if self.seconds is None:
                return float(first.numel())
            rows, length, *_ = (*first.shape, 1, 1)
            return self.seconds(rows, length)
        args, kwargs = inputs if self._is_called else ((inputs,), {})
        time = self._cost(*args, **kwargs)  # type: ignore[operator]
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
            raise ConfigError(f"microbatch_cost={time!r}: of microbatch {number}; must return seconds of at least 0")
        return float(time)
