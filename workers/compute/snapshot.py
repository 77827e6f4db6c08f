"""What an update changes, to be put back: weights, and what optimizers and learning-rate schedulers have inside."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from ...dependency import ConfigError
from .torch_internals import step_hooks


class BeforeUpdate:
    """Copies of what an update changes, as long as the update may have to be taken back.

    They take the memory of the trained parameters, of the optimizer's state and of the moving average once more.

    Raises:
        ConfigError: a hook would have seen an update that is taken back.
    """

    def __init__(self, updating: Any) -> None:
        self._updating = updating
        optimizer, average = updating.optimizer, updating.average
        grads = {name: parameter.grad for name, parameter in updating.parameters.items()}
        self._count = updating.count
        self._grads = grads
        if optimizer is None:
            return
        if step_hooks(optimizer):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__}: a hook of its step would run once more where an update is made "
                "before the norm of all gradients is known, and taken back; pass post_validation=False, or remove the "
                "hook"
            )
        if _may_write_gradients(optimizer):
            self._grads = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        self._values = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        parts = [each for each in (optimizer, updating.lr_scheduler) if each is not None]
        shared = {id(each): each for each in (*parts, *updating.parameters.values(), *grads.values())}
        self._inside = [(part, copy.deepcopy(vars(part), dict(shared))) for part in parts]
        if average is not None:
            self._average = {name: tensor.clone() for name, tensor in average.tensors.items()}, average.num_updates

    def put_back(self) -> None:
        """Let weights, optimizer and gradients be as they were."""
        updating = self._updating
        updating.count = self._count
        for name, parameter in updating.parameters.items():
            parameter.grad = self._grads[name]
        optimizer, average = updating.optimizer, updating.average
        if optimizer is None:
            return
        for parameter, value in self._values:
            # By `data`: graphs of the next step, which nobody goes on with, have noted the version.
            parameter.data.copy_(value)
        for part, inside in self._inside:
            vars(part).clear()
            vars(part).update(inside)
        if average is not None:
            average.tensors, average.num_updates = self._average


def _may_write_gradients(optimizer: Optimizer) -> bool:
    return not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.Rprop)
