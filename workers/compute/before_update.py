"""The state before an update that may have to be undone."""

import copy

import torch
from torch.optim import Optimizer

from .updating import Updating


class BeforeUpdate:
    """Copies of the state that an update changes, as long as the update may have to be undone.

    They take the memory of the trained parameters, of the optimizer's state and of the moving average once more.
    """

    def __init__(self, updating: Updating) -> None:
        self._updating, self._count, optimizer = updating, updating.count, updating.optimizer
        parameters = updating.parameters.values()
        grads = [parameter.grad for parameter in parameters]
        parts = [each for each in (optimizer, updating.lr_scheduler, updating.average) if each is not None]
        shared = {id(each): each for each in (*parts, *parameters, *grads)}
        self._inside = [(part, copy.deepcopy(vars(part), dict(shared))) for part in parts]
        copies = optimizer is not None and _may_write_gradients(optimizer)
        self._grads = [grad.clone() if copies and grad is not None else grad for grad in grads]
        groups = () if optimizer is None else optimizer.param_groups
        self._values = [(p, p.detach().clone()) for group in groups for p in group["params"]]

    def put_back(self) -> None:
        """Let weights, optimizer and gradients be as they were."""
        self._updating.count = self._count
        for parameter, grad in zip(self._updating.parameters.values(), self._grads, strict=True):
            parameter.grad = grad
        for parameter, value in self._values:
            # By `data`: abandoned graphs of the next step have noted the version.
            parameter.data.copy_(value)
        for part, inside in self._inside:
            vars(part).clear()
            vars(part).update(inside)


def _may_write_gradients(optimizer: Optimizer) -> bool:
    return not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.Rprop)
