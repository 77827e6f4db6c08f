"""Batch normalisation that sums up the statistics of microbatches, as `batch_norm.py` takes them over."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .batch_norm import SUMS
from .torch_internals import BatchNorm


class DeferredBatchNorm(BatchNorm):
    """The class that replaces a batch normalisation's; its tensors keep their names."""

    sums: Tensor
    squares: Tensor
    count: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the statistics of `input` and add them up."""
        if not self.training or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        axes = [axis for axis in range(input.dim()) if axis != 1]
        with torch.no_grad():
            numbers = input.detach().to(self.sums.dtype)
            self.sums += numbers.sum(axes)
            self.squares += (numbers * numbers).sum(axes)
            self.count += input.numel() // input.shape[1]
        return nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def commit(self) -> None:
        """Take over the statistics of all microbatches since the last update. No synchronisation."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            some = self.count > 0
            count = self.count.clamp(min=1)
            mean = self.sums / count
            variance = (self.squares / count - mean * mean).clamp(min=0) * (count / (count - 1).clamp(min=1))
            self.num_batches_tracked += some
            factor = 1.0 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
            for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
                running.copy_(torch.where(some, running + factor * (batch.to(running.dtype) - running), running))
        self.forget()

    def forget(self) -> None:
        """Begin the sums anew."""
        for held in (self.sums, self.squares, self.count):
            held.zero_()


def defer(modules: Iterable[nn.Module]) -> None:
    """Let all batch normalisations among `modules` take over their statistics at updates, by `commit`."""
    for module in modules:
        if (
            isinstance(module, BatchNorm)
            and not isinstance(module, DeferredBatchNorm)
            and module.running_mean is not None
        ):
            module.__class__ = type(type(module).__name__, (DeferredBatchNorm, type(module)), {})
            for name in SUMS:
                # In double precision, or the difference of two large numbers would be lost.
                value = torch.zeros_like(module.running_mean, dtype=torch.float64)
                module.register_buffer(name, value[0].clone() if name == "count" else value, persistent=False)
