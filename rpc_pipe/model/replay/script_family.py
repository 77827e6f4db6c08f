"""Scripts for new sizes of inputs, made of observed scripts that are alike but for their numbers.

A number of a script, such as a dimension or an answer, either is constant or follows from sizes of the inputs. It is
predicted if all formulas that fit the observations agree. Else the forward is observed at the new sizes, too.
A wrong prediction shows where the forward departs from the script, or as a payload of another shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from ...workers.compute.sequences.sequence import current
from ..observe.output_contract import form_of
from ..observe.trees import PLAIN, Path, children
from .stage_script import Script

#: most observations of one path that formulas are fitted to
_MOST_SEEN = 8
#: most paths of the forward for inputs of one form
_MOST_ROUTES = 8
#: the least size without a special meaning: torch broadcasts 1, and 0 is nothing
_LEAST_SIZE = 2


def sized_form(fields: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the form of a forward's inputs without their sizes, and the sizes; with the place of a slice."""
    sizes: list[int] = []

    def size(number: int) -> int:
        if number >= _LEAST_SIZE:
            sizes.append(number)
        return min(number, _LEAST_SIZE)

    def look(tensor: Tensor) -> Any:
        return tuple(map(size, tensor.shape)), tensor.dtype, tensor.device

    piece = current()
    place = None if piece is None else piece.left.places.get(piece.number)
    return form_of((fields, place), look, size), tuple(sizes)


class _Route:
    """Observations of one path of the forward. The last one is the pattern of scripts for new sizes.

    Args:
        outline: of its scripts, alike for all of them.
    """

    def __init__(self, outline: Any) -> None:
        self.outline = outline
        #: (sizes of the inputs, numbers of the script) of each observation
        self._seen: list[tuple[Sequence[int], Sequence[int]]] = []
        #: parts of the pattern with numbers that differ between observations: (path, part, column of each number)
        self._varying: list[tuple[Path, Any, Sequence[tuple[int, ...]]]] = []

    def add(self, script: Script, sizes: Sequence[int], parts: Sequence[tuple[Path, Any]]) -> None:
        """Add an observation, with the parts of the script that have numbers."""
        self._pattern = script
        numbers = [number for _, part in parts for number in _numbers(part)]
        self._seen = [*self._seen[1 - _MOST_SEEN :], (sizes, numbers)]
        columns = iter(list(zip(*(each for _, each in self._seen), strict=True)))
        found = [(path, part, [next(columns) for _ in _numbers(part)]) for path, part in parts]
        self._varying = [each for each in found if any(len(set(column)) > 1 for column in each[2])]

    def script_for(self, sizes: Sequence[int]) -> Script | None:
        """Return a script for these sizes; None: a number of it is not known."""
        columns = {column for _, _, own in self._varying for column in own}
        known = predictions([each for each, _ in self._seen], columns, sizes)
        if known is None:
            return None
        made: dict[int, Tensor] = {}
        changed: dict[Path, Any] = {}
        for path, part, own in self._varying:
            numbers = [known[column] for column in own]
            if isinstance(part, Tensor):
                if id(part) not in made:
                    made[id(part)] = self._pattern.placeholder(part, numbers[: part.dim()], numbers[part.dim() :])
                changed[path] = made[id(part)]
            else:
                changed[path] = torch.Size(numbers) if isinstance(part, torch.Size) else numbers[0]
        return self._pattern.resized(changed)


class ScriptFamily:
    """The scripts of inputs that differ in their sizes alone."""

    def __init__(self) -> None:
        self._routes: list[_Route] = []

    def add(self, script: Script, sizes: Sequence[int]) -> None:
        """Add a script that was observed."""
        parts, rest = _parts(script.with_numbers())
        outline = script.outline(), rest
        route = next((each for each in self._routes if each.outline == outline), None) or _Route(outline)
        self._routes = [*(each for each in self._routes if each is not route), route][-_MOST_ROUTES:]
        route.add(script, sizes, parts)

    def scripts_for(self, sizes: Sequence[int]) -> list[Script]:
        """Return a script for each path with numbers that are known at these sizes, the last observed path first."""
        found = (route.script_for(sizes) for route in reversed(self._routes))
        return [script for script in found if script is not None]


def predictions(
    seen: Sequence[Sequence[int]], columns: set[tuple[int, ...]], sizes: Sequence[int]
) -> dict[tuple[int, ...], int] | None:
    """Return the number of each column at new sizes; None: the observations leave one open.

    A formula is a line over a size, or over the sum or the product of two. All that fit must agree.

    Args:
        seen: the sizes of each observation.
        columns: numbers of a script, each by observation.

    >>> predictions([[20], [30]], {(20, 30)}, [50])  # or 20 * 20 / 25 + 10
    >>> sorted(predictions([[20], [30], [70]], {(21, 31, 71), (800, 1800, 9800), (64, 64, 64)}, [50]).values())
    [51, 64, 5000]
    """
    varying = {column for column in zip(*seen, sizes, strict=True) if len(set(column)) > 1}
    pairs = list(combinations_with_replacement(sorted(varying), 2))
    terms = varying | {tuple([a * b for a, b in zip(*pair, strict=True)]) for pair in pairs}
    terms |= {tuple([a + b for a, b in zip(*pair, strict=True)]) for pair in pairs}
    if any(len(set(term[:-1])) == 1 and term[-1] != term[0] for term in terms):
        return None  # all numbers may depend on it
    found: dict[tuple[int, ...], int] = {}
    for column in columns:
        if len(set(column)) == 1:
            found[column] = column[0]
            continue
        fitting = {number for term in terms if (number := _fitted(term, column)) is not None}
        if len(fitting) != 1 or not (number := fitting.pop())[1]:
            return None
        found[column] = number[0]
    return found


def _fitted(term: Sequence[int], column: Sequence[int]) -> tuple[int, bool] | None:
    """Return the number at the last value of a term, and whether it is whole; None: earlier values lie on no line."""
    pairs = sorted(zip(term, column, strict=False))
    (x0, y0), (x1, y1) = pairs[0], pairs[-1]
    if x0 == x1 or any((y - y0) * (x1 - x0) != (y1 - y0) * (x - x0) for x, y in pairs):
        return None
    rise, rest = divmod((y1 - y0) * (term[-1] - x0), x1 - x0)
    return y0 + rise, not rest


def _numbers(part: Any) -> Sequence[int]:
    if isinstance(part, Tensor):
        return (*part.shape, *part.stride())
    return part if isinstance(part, torch.Size) else (part,)


def _parts(tree: Any) -> tuple[list[tuple[Path, Any]], list[Any]]:
    """Return the parts of a tree that have sizes, with their paths; and all the rest, to be compared."""
    found: list[tuple[Path, Any]] = []
    rest: list[Any] = []

    def walk(tree: Any, path: Path) -> None:
        if isinstance(tree, Tensor):
            found.append((path, tree))
            rest.append((path, tree.dim(), tree.dtype, tree.device, tree.requires_grad))
        elif type(tree) is int or isinstance(tree, torch.Size):
            found.append((path, tree))
            rest.append((path, type(tree), len(_numbers(tree))))
        elif isinstance(tree, PLAIN):
            rest.append((path, type(tree), repr(tree)))
        elif isinstance(tree, (tuple, list, Mapping)) or is_dataclass(tree):
            rest.append((path, type(tree)))
            for step, child in children(tree):
                walk(child, (*path, step))
        else:
            rest.append((path, tree))  # only the same object is alike

    walk(tree, ())
    return found, rest
