"""What a loss function draws from the generators of Python and numpy: the same wherever and whenever it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .randomness import MOST_LOOKS, Randomness, python_state


class LossDraws:
    """Calls loss functions, with numbers of their own for each microbatch.

    Args:
        own: the loss function that is called in most cases, which is looked at; others, metrics, may always draw.
    """

    def __init__(self, randomness: Randomness, own: Callable[[Any, Any], Any] | None) -> None:
        self._randomness, self._own = randomness, own
        #: whether gradients are wanted -> how many more of its calls are looked at
        self._looks = {True: MOST_LOOKS, False: MOST_LOOKS}
        self._draws = False

    def __call__(
        self, loss_fn: Callable[[Any, Any], Any] | None, step: int, microbatch: int, output: Any, target: Any
    ) -> Any:
        """Return what it gives."""
        assert loss_fn is not None
        backward = torch.is_grad_enabled()
        looks = self._looks[backward] if loss_fn is self._own and not self._draws else 0
        if loss_fn is self._own and not looks and not self._draws:
            return loss_fn(output, target)
        self._randomness.seed_loss(step, microbatch)
        before = python_state() if looks else None
        loss = loss_fn(output, target)
        if looks:
            self._looks[backward] -= 1
            self._draws = python_state() != before
        return loss
