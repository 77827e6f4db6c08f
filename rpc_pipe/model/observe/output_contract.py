"""The part of a block's output that other stages take from the observation, and that must not change between calls.

Only the data of new tensors travel to other stages. Everything else must be as it was observed: the tensors' dtypes,
the structure around them, the plain values beside them, and which inputs the block returns unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...dependency import ConfigError
from .placeholder import Placeholder
from .trees import PLAIN, Path, at, leaves, replaced, tensors

#: an input that the block returns: its path in the output, and its source: the name of a weight or buffer, or the path
#: in (args, kwargs)
_ReturnedInput = tuple[Path, str | Path]
_Predicate = Callable[[Tensor], bool]


class OutputContract:
    """What one call of a block must return again, besides data.

    Args:
        where: the block's name.
        given: (args, kwargs) of the call.
        owned: returns the name of a weight or buffer, None for other tensors.
    """

    def __init__(self, where: str, result: Any, given: Any, owned: Callable[[Tensor], str | None]) -> None:
        self._where = where
        self._form = form_of(result)
        self._dtypes = [tensor.dtype for tensor in tensors(result)]
        paths = {id(tensor): path for path, tensor in leaves(given)}
        found = ((path, paths.get(id(tensor)) or owned(tensor)) for path, tensor in leaves(result))
        self._returned_inputs: list[_ReturnedInput] = [(path, source) for path, source in found if source is not None]

    def check(self, result: Any, given: Any, owned: Callable[[str], Tensor]) -> None:
        """Check the result of a call.

        Args:
            owned: returns a weight or buffer by its name.

        Raises:
            ConfigError: it differs from the observation.
        """
        if (found := form_of(result)) != self._form:
            raise ConfigError(
                f"model: block {self._where} returned {_describe(found)}, and {_describe(self._form)} when it was "
                f"observed: tensors travel to the other stages, but not what is beside them; return a tensor instead"
            )
        for tensor, dtype in zip(tensors(result), self._dtypes, strict=True):
            if tensor.dtype is not dtype:
                raise ConfigError(
                    f"model: block {self._where} returned a tensor of {tensor.dtype} for this microbatch, and of "
                    f"{dtype} when it was observed, which others may go by; let it always return one type, by .to()"
                )
        for path, source in self._returned_inputs:
            if at(result, path) is not (owned(source) if isinstance(source, str) else at(given, source)):
                what = source if isinstance(source, str) else "one of its arguments"
                raise ConfigError(
                    f"model: block {self._where} returned {what} itself when it was observed, and another tensor in "
                    f"its place for this microbatch, which other stages do not get; return a copy by .clone() there"
                )


def check_attribute(where: str, name: str, tree: Any, observed: Any) -> None:
    """Check an attribute that a block has set, of which other stages use tensors.

    Raises:
        ConfigError: besides its tensors' data it differs from the observation.
    """
    if (found := form_of(tree)) != observed:
        raise ConfigError(
            f"model: block {where} left {_describe(found)} in its attribute {name}, and {_describe(observed)} when "
            f"it was observed: tensors travel to the other stages, but not what is beside them; leave tensors alone "
            f"there, as many in each forward"
        )


def alias_given(result: Any, known: _Predicate, left: _Predicate, unread: _Predicate) -> Any:
    """Return the result of a block with aliases for inputs that it returns, as other calls may return new tensors.

    Inputs with data stay the same objects, so that the model may decide by them, except the first tensor of the result,
    which is taken for what the block computes.

    Args:
        known: whether a tensor existed before the block.
        left: whether the block has put it into a container that it was given, which other stages do not see; a clone
            is returned then.
        unread: whether it has no data only because a field is not read here.
    """
    others: dict[int, Tensor] = {}
    places: dict[Path, Tensor] = {}
    for number, (path, tensor) in enumerate(leaves(result)):
        if left(tensor):
            places[path] = others.setdefault(id(tensor), tensor.clone())
        elif known(tensor) and ((isinstance(tensor, Placeholder) and not unread(tensor)) or not number):
            places[path] = others.setdefault(id(tensor), tensor.view_as(tensor))
    return replaced(result, places)


def form_of(tree: Any) -> Any:
    """Return a tree without its tensors and the contents of objects, to be compared."""
    if isinstance(tree, Tensor):
        return Tensor
    if isinstance(tree, float):
        return repr(tree)  # nan equals nan
    if isinstance(tree, PLAIN):
        return type(tree), tree
    if isinstance(tree, (tuple, list)):
        return type(tree), tuple([form_of(child) for child in tree])
    if isinstance(tree, Mapping):
        return type(tree), tuple([(key, form_of(child)) for key, child in tree.items()])
    if dataclasses.is_dataclass(tree):
        named = [(field.name, getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
        return type(tree), tuple([(name, form_of(child)) for name, child in named])
    return type(tree), tuple([path for path, _ in leaves(tree)])


def _describe(form: Any) -> str:
    """Return a short description of a form."""
    if form is Tensor:
        return "a tensor"
    if isinstance(form, str):
        return form
    kind, inside = form
    if kind in (tuple, list):
        return f"a {kind.__name__} of {', '.join(map(_describe, inside[:4]))}{', …' * (len(inside) > 4)}"
    if isinstance(inside, tuple):
        return f"a {kind.__name__}"
    return repr(inside)
