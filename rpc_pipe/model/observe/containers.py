"""Containers and configuration objects of a user's model that forwards only read: copies of its modules refer to them.

So changes of the user between two steps hold in every copy, and no step looks for them.
"""

import copy
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import PurePath
from threading import RLock
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ...workers.compute.modules.module_state import OF_TORCH, Place
from .side_effects import fill
from .trees import PLAIN

_ATOMS = (*PLAIN, Enum, range, Number, PurePath, FunctionType, BuiltinFunctionType)
#: pickling methods of objects with attributes as their whole state; other objects, such as generators, may have more
_BY_ATTRIBUTES: tuple[Any, ...] = (object.__reduce__, SimpleNamespace.__reduce__)
#: forwards that are observed may write containers, which other threads read and observe
_OBSERVING = RLock()


def readable(value: Any) -> dict[int, Any]:
    """Return the containers and objects, by id, in a value of numbers, words and the like; none if it holds more."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, _ATOMS) or id(each) in found:
            continue
        if isinstance(each, partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, (tuple, frozenset)):
            waiting += each
        elif (inside := _inside(each)) is None:
            return {}
        else:
            found[id(each)] = each
            waiting += _values(inside)
    return found


def _inside(box: Any) -> Any:
    """Return the list, set or dict that has the present contents of a container or object; None: it is not known."""
    if isinstance(box, (list, set, MutableMapping)):
        return box
    kind: Any = type(box)
    is_known = kind.__reduce__ in _BY_ATTRIBUTES and kind.__reduce_ex__ is object.__reduce_ex__
    return vars(box) if is_known and hasattr(box, "__dict__") and not isinstance(box, (nn.Module, Tensor)) else None


def _values(inside: Any) -> Iterable[Any]:
    return inside.values() if isinstance(inside, MutableMapping) else inside


def shared(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return the objects that copies of modules have in the place of attributes, by id of the attribute's value."""
    found: dict[int, Any] = {}
    for value in (value for module in modules for name, value in vars(module).items() if name not in OF_TORCH):
        if id(value) not in found and (boxes := readable(value)):
            caching = [box for box in boxes.values() if getattr(box, "use_cache", None) is True]
            if not caching or caching == [value]:
                found[id(value)] = _without_cache(value) if caching else value
    return found


def _without_cache(config: Any) -> Any:
    """Return an object with the attributes of a configuration, also later ones, except that it uses no cache."""
    kind = type(config)
    own = {"use_cache": property(lambda _: False, lambda *_: None), "__module__": kind.__module__}
    made: Any = object.__new__(type(kind.__name__, (kind,), own))
    object.__setattr__(made, "__dict__", vars(config))
    return made


class Followed:
    """The attributes of a copy of a model with objects of the user's, until a forward writes these.

    Args:
        modules: of the copy.
        kept: ids of the objects.
    """

    def __init__(self, modules: Iterable[nn.Module], kept: set[int]) -> None:
        held = [(module, name, value) for module in modules for name, value in vars(module).items()]
        self._places: list[Place] = [(module, name) for module, name, value in held if id(value) in kept]
        #: (container, its list, set or dict, ids of the contents, a copy of these), before the forward
        self._before: list[tuple[Any, Any, list[int], Any]] = []
        self._written: set[int] = set()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Return a context for an observed forward; afterwards the copy has copies of the containers that it wrote."""
        with _OBSERVING:
            boxes = {key: box for module, name in self._places for key, box in readable(vars(module)[name]).items()}
            insides = [(box, _inside(box)) for box in boxes.values()]
            self._before = [(box, held, list(map(id, _values(held))), copy.copy(held)) for box, held in insides]
            try:
                yield
            finally:
                self._part()

    def look(self) -> None:
        """Note which are written now; a forward may take its changes back before it ends."""
        for box, inside, ids, _ in self._before:
            if list(map(id, _values(inside))) != ids:
                self._written.add(id(box))

    def _part(self) -> None:
        for box, inside, _, before in self._before:
            if id(box) in self._written and isinstance(inside, set):
                inside.intersection_update(before)
                inside.update(before)
            elif id(box) in self._written:
                fill(inside, before)
        memo: dict[int, Any] = {}
        for module, name in self._places if self._written else ():
            if not self._written.isdisjoint(readable(vars(module)[name])):
                vars(module)[name] = copy.deepcopy(vars(module)[name], memo)
        self._places = [(m, n) for m, n in self._places if id(vars(m)[n]) not in set(map(id, memo.values()))]
        self._before, self._written = [], set()
