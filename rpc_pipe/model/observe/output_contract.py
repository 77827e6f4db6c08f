"""The part of a block's output that other stages take from the observation, and that must not change between calls.

Only tensors travel to other stages. Everything else must be as it was observed: the structure around them, and the
plain values beside them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...dependency import ModelError
from .placeholder import Placeholder
from .trees import PLAIN, Path, children, leaves, replaced


def check_form(where: str, tree: Any, observed: Any, attribute: str = "") -> None:
    """Check the result of a block, or an attribute with tensors that other stages use.

    Raises:
        ModelError: besides its tensors it differs from the observation.
    """
    if form_of(tree) != observed:
        what = f"left something else in its attribute {attribute}" if attribute else "returned something else"
        why = f"block {where} {what} beside its tensors than when it was observed, and only tensors travel"
        raise ModelError(f"model: {why}; return or leave tensors alone, as many in each forward")


def alias_given(result: Any, known: Callable[[Tensor], bool]) -> Any:
    """Return the result of a block with aliases for inputs that it returns, as other calls may return new tensors.

    Inputs with data stay the same objects, so that the model may decide by them. Only the first tensor of the result
    counts as computed by the block.

    Args:
        known: whether a tensor existed before the block.
    """
    others: dict[int, Tensor] = {}
    places: dict[Path, Tensor] = {}
    for number, (path, tensor) in enumerate(leaves(result)):
        if known(tensor) and (isinstance(tensor, Placeholder) or not number):
            places[path] = others.setdefault(id(tensor), tensor.view_as(tensor))
    return replaced(result, places)


def form_of(
    tree: Any, of_tensor: Callable[[Tensor], Any] = lambda _: Tensor, of_int: Callable[[int], Any] | None = None
) -> Any:
    """Return a tree without the contents of objects, to be compared and hashed.

    Args:
        of_tensor: its result stands for a tensor.
        of_int: its result stands for an int, but not for one inside of an object.
    """
    if isinstance(tree, Tensor):
        return of_tensor(tree)
    if of_int is not None and type(tree) is int:
        return int, of_int(tree)
    if isinstance(tree, (float, slice)):
        return repr(tree)  # nan equals nan
    if isinstance(tree, PLAIN):
        return type(tree), tree
    if isinstance(tree, (tuple, list, Mapping)) or dataclasses.is_dataclass(tree):
        return type(tree), tuple([(step, form_of(child, of_tensor, of_int)) for step, child in children(tree)])
    return type(tree), tuple([(path, of_tensor(tensor)) for path, tensor in leaves(tree)])
