"""Gradients of a route or an update, apart from the weights: several sets of them for the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor, nn

Key = TypeVar("Key")


class GradientSets(Generic[Key]):
    """Sets of gradients by key. One set is in place, as `grad` of the parameters; all other sets are kept apart.

    Each set costs the memory of its gradients. Weights and optimizer state exist once.

    Attributes:
        present: key of the set in place.
    """

    def __init__(self, present: Key) -> None:
        self.present = present
        self._apart: dict[Key, list[Tensor | None]] = {}

    def turn(self, key: Key, parameters: Sequence[nn.Parameter]) -> Key:
        """Put the set of a key in place; return the key of the set before."""
        before = self.present
        if key != before:
            if any(parameter.grad is not None for parameter in parameters):
                self._apart[before] = [parameter.grad for parameter in parameters]
            grads = self._apart.pop(key, [None] * len(parameters))
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            self.present = key
        return before

    def clear(self, present: Key) -> None:
        """Forget all sets that are kept apart; the set in place belongs to `present` from now on."""
        self._apart.clear()
        self.present = present
