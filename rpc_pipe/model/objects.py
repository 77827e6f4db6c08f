"""What a forward changes in plain objects that modules hold, such as a configuration that counts.

Of modules it is known what they hold, and put back where a forward is observed, or run again; what is inside of an
object of one's own is anybody's business, so it is only seen that it changes.
"""

from __future__ import annotations

import random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..dependency import ConfigError
from ..workers.compute.inner_state import OF_TORCH
from .skeleton import Skeleton

_NO_STATE = (nn.Module, Tensor, random.Random, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_NUMBERS = (int, float, complex, Tensor)


class Objects:
    """Numbers and tensors in the objects that modules hold in attributes, as they are now.

    Words and switches are not looked at: a forward that sets one, as Hugging Face's `config.problem_type`, sets it to
    the same each time.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        held: dict[int, tuple[Any, str]] = {}
        for module in skeleton.module.modules():
            for name, value in vars(module).items():
                if name not in OF_TORCH and is_object(value):
                    held.setdefault(id(value), (value, f"attribute {name} of {skeleton.name_of(module)}"))
        self._held = [(value, where, _state(value)) for value, where in held.values()]

    def refuse_changed(self) -> None:
        """Put back what has been changed since, and refuse it.

        Raises:
            ConfigError: something was.
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
    """Tell whether a value is an object of somebody's that may hold numbers."""
    return hasattr(value, "__dict__") and not isinstance(value, _NO_STATE)


def _state(value: Any) -> dict[str, Any]:
    return {
        name: held for name, held in vars(value).items() if isinstance(held, _NUMBERS) and not isinstance(held, bool)
    }
