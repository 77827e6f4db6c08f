"""What an update changes, to be put back: weights, and what optimizers and learning-rate schedulers have inside."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...dependency import ConfigError
from .torch_internals import step_hooks


class BeforeUpdate:
    """Copies of what an update changes, as long as the update may have to be taken back.

    They take the memory of the trained parameters, of the optimizer's state and of the moving average once more.
    """

    def __init__(self, updating: Any) -> None:
        self._updating = updating
        optimizer, average = updating.optimizer, updating.average
        grads = {name: parameter.grad for name, parameter in updating.parameters.items()}
        self._count = updating.count
        self._grads = grads
        if optimizer is None:
            return
        if _may_write_gradients(optimizer):
            self._grads = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        self._values = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        known = {id(each) for each in (*updating.parameters.values(), *grads.values())}
        self._put_back = [snapshot(each, known) for each in (optimizer, updating.lr_scheduler)]
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
        for put_back in self._put_back:
            put_back()
        if average is not None:
            average.tensors, average.num_updates = self._average


def _may_write_gradients(optimizer: Optimizer) -> bool:
    return not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.Rprop)


def refuse_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks that would have seen an update which is taken back.

    Raises:
        ConfigError: there is one.
    """
    if step_hooks(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: a hook of its step would run once more where an update is made "
            "before the norm of all gradients is known, and taken back; pass post_validation=False, or remove the hook"
        )


def snapshot(value: Any, known: set[int]) -> Callable[[], Any]:
    """Return a function that puts back into `value` what is inside now, however deep, and returns it.

    Args:
        known: ids of objects that others see to, or that are kept already.
    """
    if id(value) in known or isinstance(value, (bool, int, float, str, FunctionType, MethodType, type, nn.Module)):
        return lambda: value
    if isinstance(value, (Tensor, dict, list, set, torch.Generator)) or _has_attributes(value):
        known.add(id(value))
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, dict):
        return _dict(value, {key: snapshot(part, known) for key, part in value.items()})
    if isinstance(value, list):
        return _list(value, [snapshot(part, known) for part in value])
    if isinstance(value, tuple):
        parts = [snapshot(part, known) for part in value]
        return lambda: [part() for part in parts] and value
    if isinstance(value, set):
        members = set(value)
        return lambda: value.clear() or value.update(members) or value  # type: ignore[func-returns-value]
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if _has_attributes(value):
        inside = snapshot(vars(value), known)
        return lambda: inside() and value
    return lambda: value


def _has_attributes(value: Any) -> bool:
    return isinstance(value, (Optimizer, LRScheduler)) or (callable(value) and hasattr(value, "__dict__"))


def _tensor(value: Tensor) -> Callable[[], Tensor]:
    before = value.detach().clone()

    def put_back() -> Tensor:
        value.data.copy_(before)
        return value

    return put_back


def _dict(value: dict[Any, Any], parts: dict[Any, Callable[[], Any]]) -> Callable[[], Any]:
    def put_back() -> Any:
        now = {key: part() for key, part in parts.items()}
        value.clear()
        value.update(now)
        return value

    return put_back


def _list(value: list[Any], parts: list[Callable[[], Any]]) -> Callable[[], Any]:
    def put_back() -> Any:
        value[:] = [part() for part in parts]
        return value

    return put_back
