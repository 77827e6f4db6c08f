"""Finds out whether operators draw random numbers."""

from __future__ import annotations

from typing import Any

import torch

from .randomness import PYTHON_SEEDS
from .torch_internals import OperatorMode

_SEED = torch.ops.aten.randint.default


class NotedDraws(OperatorMode):
    """Records whether an operator draws numbers, other than a seed for the generators of Python."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seeds = func is _SEED and args[0] == PYTHON_SEEDS
        self.found = self.found or (_draws(func, args, kwargs or {}) and not seeds)
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator draws: an attention draws if it is to drop out."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [each.name for each in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))
