"""Hooks with closures over modules of the model: in a copy of the model they must hold the copies."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from ...workers.compute.modules.module_state import HOOKS
from .trees import CLOSED


def rebind(modules: Iterable[nn.Module], memo: dict[int, Any]) -> Callable[[], None]:
    """Let deepcopy, by its `memo`, copy the hooks with closures over modules; return the function that fills these."""
    held = {id(module) for module in modules}
    cells: list[tuple[CellType, Any]] = []

    def reaches(value: Any, depth: int) -> bool:
        return any(id(module) in held for module in modules_in([value], depth))

    def visit(value: Any, depth: int) -> None:
        if not isinstance(value, FunctionType):
            for each in inside(value) if depth else ():
                visit(each, depth - 1)
        elif id(value) not in memo and reaches(value, depth):
            new = []
            for cell, content in _closure(value):
                new.append(CellType() if reaches(content, depth) else cell)
                cells.extend([(new[-1], content)] if new[-1] is not cell else [])
            made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(new))
            made.__kwdefaults__ = value.__kwdefaults__
            memo[id(value)] = made
            for _, content in _closure(value):
                visit(content, depth - 1)

    for module in modules:
        for name in HOOKS:
            visit(list(vars(module)[name].values()), 4)

    def fill() -> None:
        for cell, content in cells:
            cell.cell_contents = copy.deepcopy(content, memo)

    return fill


def _closure(function: FunctionType) -> Iterator[tuple[CellType, Any]]:
    for cell in function.__closure__ or ():
        try:
            yield cell, cell.cell_contents
        except ValueError:  # not set yet
            yield cell, None


def modules_in(values: Iterable[Any], depth: int) -> Iterator[nn.Module]:
    """Yield the modules among values, and in their containers, closures and partial functions down to a depth."""
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, MethodType):
            yield from modules_in([value.__self__], depth)
        elif depth:
            held = [each for _, each in _closure(value)] if isinstance(value, FunctionType) else inside(value)
            yield from modules_in(held, depth - 1)


def inside(value: Any) -> list[Any]:
    """Return the contents of a partial function, a container or a bound method."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (list, tuple, set, dict)):
        return list(value.values() if isinstance(value, dict) else value)
    return [value.__self__] if isinstance(value, CLOSED) and hasattr(value, "__self__") else []
