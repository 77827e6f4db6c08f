"""Batch normalisation that sums up the statistics of microbatches, as `batch_norm.py` takes them over."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....dependency import ConfigError
from .batch_norm import SUMS, is_deferred
from .torch_internals import BatchNorm


def defer(modules: Iterable[nn.Module]) -> None:
    """Let all batch normalisations among `modules` take over their statistics at updates, by `commit`.

    Raises:
        ConfigError: a class has a forward that writes running statistics, whether or not it is to track them.
    """
    for module in modules:
        if isinstance(module, BatchNorm) and module.running_mean is not None and not is_deferred(module):
            names = getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
            if "running_mean" in names and "track_running_stats" not in names:
                raise ConfigError(
                    f"deferred_batch_norm: {type(module).__name__}.forward writes running_mean itself; leave it out"
                )
            # A forward in training normalises by its batch still, and leaves the running statistics alone.
            module.track_running_stats = False
            for name in SUMS:
                # In double precision, or the difference of two large numbers would be lost.
                value = torch.zeros_like(module.running_mean, dtype=torch.float64)
                module.register_buffer(name, value[0].clone() if name == "count" else value, persistent=False)
            module.register_forward_pre_hook(_add_up, with_kwargs=True)


@torch.no_grad()
def _add_up(module: Any, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> None:
    """Add the statistics of a forward's input to the sums."""
    if module.training:
        numbers = (args[0] if args else kwargs["input"]).detach().to(module.sums.dtype)
        module._check_input_dim(numbers)
        axes = [axis for axis in range(numbers.dim()) if axis != 1]
        module.sums += numbers.sum(axes)
        module.squares += (numbers * numbers).sum(axes)
        module.count += numbers.numel() // numbers.shape[1]
