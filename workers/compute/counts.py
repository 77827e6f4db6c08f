"""Numbers, tensors and lists that modules and other objects hold, and which of them change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .digest import sample
from .inner_state import BOXES, OF_TORCH

_NUMBERS = (int, float, complex, Tensor, *BOXES)
#: a module, or an object, and the name of what it holds
Place = tuple[Any, str]


def held(owners: Iterable[Any]) -> dict[Place, tuple[Any, Any]]:
    """Return the numbers, tensors and lists that attributes and buffers hold, and what tells whether they change."""
    return {
        (owner, name): (value, _inside(value))
        for owner in owners
        for name, value in _named(owner)
        if name not in OF_TORCH and isinstance(value, _NUMBERS)
    }


def changed(before: dict[Place, tuple[Any, Any]]) -> list[Place]:
    """Return where something else is held now."""
    found = []
    for (owner, name), (value, inside) in before.items():
        now = dict(_named(owner)).get(name)
        if type(now) is not type(value):
            found.append((owner, name))
        elif isinstance(value, Tensor):
            if now is not value or not torch.equal(_inside(now).nan_to_num(), inside.nan_to_num()):
                found.append((owner, name))
        elif _inside(now) != inside:
            found.append((owner, name))
    return found


def _inside(value: Any) -> Any:
    if isinstance(value, Tensor):
        return sample(value).clone()
    return len(value) if type(value) in BOXES else value


def _named(owner: Any) -> list[tuple[str, Any]]:
    return [*vars(owner).items(), *getattr(owner, "_buffers", {}).items()]
