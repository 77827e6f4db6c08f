"""Batch normalisation with running statistics of the whole batch, not of one microbatch after the other.

Deferred batch normalisation (Kim et al. 2020, torchgpipe, section 3.3): a microbatch is normalised by its statistics;
its part of the running ones is summed up, and taken over once, at the update. The sums of replicas are added up
before, with their gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .torch_internals import BatchNorm

#: names of the buffers with sums over microbatches, and of the buffers that take them over
SUMS = ("sums", "squares", "count")
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def is_deferred(module: nn.Module) -> bool:
    """Return whether `deferred_batch_norm.py` has changed a module."""
    return isinstance(module, BatchNorm) and "squares" in module._buffers


class Statistics:
    """The sums of the batch normalisations among `modules` since the last update."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        #: sums, and their values after the last complete step since the last update
        self._held: list[tuple[Tensor, Tensor]] = []

    def _deferred(self) -> list[Any]:
        return list(filter(is_deferred, self._modules))

    def commit(self) -> None:
        """Take over all of it, and begin the sums anew."""
        for module in self._deferred():
            _commit(module)
        self._held = []
        self.restore()  # to none

    def hold(self) -> None:
        """Keep the sums of a complete step for a later update."""
        self._held = [(tensor, tensor.clone()) for tensor in self.named(summed=True).values()]

    def restore(self) -> None:
        """Set the sums to the values after complete steps."""
        for tensor in self.named(summed=True).values():
            tensor.zero_()
        for tensor, held in self._held:
            tensor.copy_(held)

    def named(self, *, summed: bool) -> dict[str, Tensor]:
        """Return by name the sums, or the running statistics that have taken them over."""
        norms = enumerate(self._deferred())
        return {f"{n} {name}": getattr(m, name) for n, m in norms for name in (SUMS if summed else _RUNNING)}

    def sums(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Return the sums by name, with the running mean that they will change."""
        return [(m.running_mean, {n: getattr(m, n) for n in SUMS}) for m in self._deferred()]


@torch.no_grad()
def _commit(module: Any) -> None:
    """Take over the statistics of all microbatches since the last update. No synchronisation."""
    some = module.count > 0
    count = module.count.clamp(min=1)
    mean = module.sums / count
    variance = (module.squares / count - mean * mean).clamp(min=0) * (count / (count - 1).clamp(min=1))
    module.num_batches_tracked += some
    factor = 1.0 / module.num_batches_tracked.clamp(min=1) if module.momentum is None else module.momentum
    for running, batch in ((module.running_mean, mean), (module.running_var, variance)):
        running.copy_(torch.where(some, running + factor * (batch.to(running.dtype) - running), running))
