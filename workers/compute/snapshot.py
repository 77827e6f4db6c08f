"""What optimizers and learning-rate schedulers have inside, to be put back into the same objects."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


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
