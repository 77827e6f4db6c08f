"""Loss scaling for float16: one decision for all stages, with the bits of `torch.amp.GradScaler`.

Gradients in float16 lose what is small, so backward starts from the loss times a scale, and gradients are divided by it
before they are used. If any gradient on any stage has overflowed, no stage updates, and the scale shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .torch_internals import multiply, norms_of


class LossScale:
    """The scale as one shard knows it; those of all shards make the same decisions.

    Args:
        scaler: what it begins with: scale, factors, interval; None: nothing is scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.enabled = scaler is not None and scaler.is_enabled()
        self.scale = float(scaler.get_scale()) if scaler is not None and self.enabled else 1.0
        #: updates since the scale has changed
        self.streak = 0
        if scaler is not None:
            self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
            self._interval = scaler.get_growth_interval()

    def unscale(self, grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """Divide gradients by the scale; return, without waiting for the device, whether all were finite."""
        if not grads:
            return torch.ones((), dtype=torch.bool, device=device)
        largest = torch.stack([norm.float() for norm in norms_of(grads, float("inf"))])
        inverse = torch.tensor(self.scale, dtype=torch.float64).reciprocal().float().item()
        multiply(grads, inverse)
        return largest.isfinite().all()

    def update(self, finite: bool) -> None:
        """Take note of whether an update was possible."""
        if not finite:
            self.scale, self.streak = _float32(self.scale * self._backoff), 0
        elif self.streak + 1 == self._interval:
            grown = _float32(self.scale * self._growth)
            self.scale, self.streak = (grown if grown < float("inf") else self.scale), 0
        else:
            self.streak += 1


def _float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()
