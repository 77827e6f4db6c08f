"""Refusal of forwards that change numbers in plain objects of modules, such as a configuration with a counter.

The attributes of modules are restored where a forward is observed or run again. The state of arbitrary objects cannot
be restored in general, so a change of it is refused.
"""

from __future__ import annotations

import random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ...dependency import ConfigError
from ...workers.compute.inner_state import OF_TORCH
from .skeleton import Skeleton

_NO_STATE = (nn.Module, Tensor, random.Random, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_NUMBERS = (int, float, complex, Tensor)


class ObjectState:
    """The numbers and tensors in objects that modules hold in attributes, at the time of its making.

    Strings and booleans are ignored: a forward that sets one, such as Hugging Face's `config.problem_type`, sets it to
    the same value each time.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        held: dict[int, tuple[Any, str]] = {}
        for module in skeleton.module.modules():
            for name, value in vars(module).items():
                if name not in OF_TORCH and is_object(value):
                    held.setdefault(id(value), (value, f"attribute {name} of {skeleton.name_of(module)}"))
        self._held = [(value, where, _state(value)) for value, where in held.values()]

    def refuse_changed(self) -> None:
        """Restore and refuse what has changed since.

        Raises:
            ConfigError: something has.
        """
        for value, where, before in self._held:
            now = _state(value)
            changed = [name for name, new in now.items() if name in before and new is not before[name]]
            changed = [name for name in changed if isinstance(now[name], Tensor) or now[name] != before[name]]
            if changed:
                vars(value).update(before)
                raise ConfigError(
                    f"model: its forward changes {changed[0]} of a {type(value).__name__}, which is {where} and no "
                    f"module: stages have copies of it, and nobody can put it back; let the module itself hold it"
                )


def is_object(value: Any) -> bool:
    """Return whether a value is an arbitrary object that may hold numbers."""
    return hasattr(value, "__dict__") and not isinstance(value, _NO_STATE)


def _state(value: Any) -> dict[str, Any]:
    return {
        name: held for name, held in vars(value).items() if isinstance(held, _NUMBERS) and not isinstance(held, bool)
    }
