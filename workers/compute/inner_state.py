"""What attributes of modules hold inside: generators of random numbers, lists, dicts, sets and deques."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

#: what every module has, which is torch's
OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
BOXES = frozenset((list, dict, set, deque))
#: larger ones of these are taken for tables, which nobody changes
MOST_INSIDE = 1024

#: (module, attribute)
Place = tuple[nn.Module, str]


class InnerState:
    """What is inside of attributes now.

    Args:
        places: of those that can be looked into.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        held = [(module, vars(module).get(name)) for module, name in places]
        self._held = [(module, value, state) for module, value in held if (state := _inside(value)) is not None]

    def changed(self) -> set[nn.Module]:
        """Return the modules where something else is inside now."""
        return {module for module, value, state in self._held if not _same(_inside(value), state)}

    def put_back(self) -> None:
        """Let the attributes hold inside what they did."""
        for _, value, state in self._held:
            _set(value, state)


def may_count(module: nn.Module) -> bool:
    """Tell whether a forward may write attributes of a module: those of torch, without anybody's hooks, do not."""
    if isinstance(module, torch.jit.ScriptModule) or module._forward_hooks or module._forward_pre_hooks:
        return True
    return not type(module).__module__.startswith("torch.")


def has_generator(module: nn.Module) -> bool:
    """Tell whether a module draws random numbers from a generator of its own."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random) + ((numpy.random.Generator, numpy.random.RandomState) if numpy else ())
    return any(isinstance(value, kinds) for value in vars(module).values())


def places_in(modules: Sequence[nn.Module]) -> list[Place]:
    """Return the attributes that can be looked into."""
    return [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if (name not in OF_TORCH or (name == "_modules" and value)) and _inside(value) is not None
        if not (type(value) in BOXES and len(value) > MOST_INSIDE)
    ]


def _inside(value: Any) -> Any:
    """Return a copy of what is inside; None: there is nothing, or nothing known."""
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value) in BOXES:
        return value.copy()
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    return value.get_state() if numpy and isinstance(value, numpy.random.RandomState) else None


def _set(value: Any, state: Any) -> None:
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(state)
    elif isinstance(value, list):
        value[:] = state
    elif isinstance(value, deque):
        value.clear()
        value.extend(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value.bit_generator.state = state


def _same(some: Any, other: Any) -> bool:
    if isinstance(some, torch.Tensor):
        return torch.equal(some, other)
    if isinstance(some, dict):
        return list(some) == list(other) and _same([*some.values()], [*other.values()])
    if isinstance(some, (list, deque)):
        return len(some) == len(other) and all(
            a is b or (isinstance(a, _PLAIN) and a == b) for a, b in zip(some, other, strict=True)
        )
    return repr(some) == repr(other)
