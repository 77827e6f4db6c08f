"""The part of a block's output that other stages take from the observation, and that must not change between calls.

Only tensors travel to other stages. Everything else must be as it was observed: the structure around them, and the
plain values beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...dependency import ModelError
from .placeholder import Placeholder
from .trees import PLAIN, Path, leaves, replaced

_Predicate = Callable[[Tensor], bool]


def check_form(where: str, tree: Any, observed: Any, attribute: str = "") -> None:
    """Check what a block has returned, or left in an attribute of which other stages use tensors.

    Raises:
        ModelError: besides its tensors it differs from the observation.
    """
    if (found := form_of(tree)) != observed:
        told = f"left {{}} in its attribute {attribute}" if attribute else "returned {}"
        raise ModelError(
            f"model: block {where} {told.format(_describe(found))}, and {_describe(observed)} when it was observed: "
            "tensors travel to the other stages, but not what is beside them; return or leave tensors alone, as many "
            "in each forward"
        )


def alias_given(result: Any, known: _Predicate, left: _Predicate) -> Any:
    """Return the result of a block with aliases for inputs that it returns, as other calls may return new tensors.

    Inputs with data stay the same objects, so that the model may decide by them, except the first tensor of the result,
    which is taken for what the block computes.

    Args:
        known: whether a tensor existed before the block.
        left: whether the block has put it into a container that it was given, which other stages do not see; a clone
            is returned then.
    """
    others: dict[int, Tensor] = {}
    places: dict[Path, Tensor] = {}
    for number, (path, tensor) in enumerate(leaves(result)):
        if left(tensor):
            places[path] = others.setdefault(id(tensor), tensor.clone())
        elif known(tensor) and (isinstance(tensor, Placeholder) or not number):
            places[path] = others.setdefault(id(tensor), tensor.view_as(tensor))
    return replaced(result, places)


def form_of(tree: Any) -> Any:
    """Return a tree without its tensors and the contents of objects, to be compared."""
    if isinstance(tree, Tensor):
        return Tensor
    if isinstance(tree, float):
        return repr(tree)  # nan equals nan
    if isinstance(tree, (*PLAIN, slice)):
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
