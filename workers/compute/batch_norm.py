"""Batch normalisation with running statistics of the whole batch, not of one microbatch after the other.

Deferred batch normalisation (Kim et al. 2020, torchgpipe, section 3.3): a microbatch is normalised by its statistics;
its part of the running ones is summed up, and taken over once, at the update. The sums of replicas are added up
before, with their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .torch_internals import BatchNorm

#: names of the buffers with sums over microbatches, and of the buffers that take them over
_SUMS = ("sums", "squares", "count")
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


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
            for name in _SUMS:
                # In double precision, or the difference of two large numbers would be lost.
                value = torch.zeros_like(module.running_mean, dtype=torch.float64)
                module.register_buffer(name, value[0].clone() if name == "count" else value, persistent=False)


class Statistics:
    """The sums of the batch normalisations among `modules` since the last update."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        #: sums, and their values after the last complete step since the last update
        self._held: list[tuple[Tensor, Tensor]] = []

    def _deferred(self) -> list[DeferredBatchNorm]:
        return [module for module in self._modules if isinstance(module, DeferredBatchNorm)]

    def commit(self) -> None:
        """Take over all of it."""
        for module in self._deferred():
            module.commit()
        self._held = []

    def hold(self) -> None:
        """Keep the sums of a complete step for a later update."""
        self._held = [(tensor, tensor.clone()) for tensor in self.named(summed=True).values()]

    def restore(self) -> None:
        """Set the sums to the values after complete steps."""
        for module in self._deferred():
            module.forget()
        for tensor, held in self._held:
            tensor.copy_(held)

    def named(self, *, summed: bool) -> dict[str, Tensor]:
        """Return by name the sums, or the running statistics that have taken them over."""
        norms = enumerate(self._deferred())
        return {f"{n} {name}": getattr(m, name) for n, m in norms for name in (_SUMS if summed else _RUNNING)}

    def sums(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Return the sums by name, with the running mean that they will change."""
        return [
            (m.running_mean, {n: getattr(m, n) for n in _SUMS}) for m in self._deferred() if m.running_mean is not None
        ]
