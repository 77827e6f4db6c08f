"""Blocks of a model that share nothing with the modules around them, so that they can stand among copies of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..workers.compute.modules.module_state import OF_TORCH
from .observe.closures import modules_in


def separate(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no module, tensor or container with the rest; of nested ones the outer."""
    count = Counter(id(each) for module in model.modules() for each in _held(module))
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested and _is_separate(block, count)]


def _is_separate(block: nn.Module, count: Counter[int]) -> bool:
    parts = list(block.modules())
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        return False
    inside = Counter(id(each) for part in parts for each in _held(part))
    if any(found != count[each] for each, found in inside.items()):
        return False
    return set(parts).issuperset(module for part in parts for module in _mentioned(part))


def _held(module: nn.Module) -> Iterator[Any]:
    """Yield the objects of a module that another module could hold too: members, tensors, and containers."""
    for held in (module._modules, module._parameters, module._buffers):
        yield from (each for each in held.values() if each is not None)
    for name, value in vars(module).items():
        if name not in OF_TORCH and isinstance(value, (list, dict, set, Tensor)):
            yield value


def _mentioned(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in plain attributes and hooks of a module, such as an owner that it calls back."""
    for name, value in vars(module).items():
        if name not in ("_modules", "_parameters", "_buffers"):
            yield from modules_in([value], 3)


def mentioned(function: Any) -> dict[str, Any]:
    """Return the objects in a function's globals and closure, and the function itself, by name."""
    found = {"": function}
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is not None:
        names = {name for each in (code, *code.co_consts) for name in getattr(each, "co_names", ())}
        known = getattr(function, "__globals__", {})
        found |= {name: known[name] for name in names if name in known}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # not set yet
                found[name] = cell.cell_contents
    return found
