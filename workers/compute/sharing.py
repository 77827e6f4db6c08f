"""Outputs of a stage that share memory with one another, or with what a layer keeps, or that are views.

Inside one model, writing one of them in place also writes the others; behind a cut they no longer share memory. So the
next stage is told which of its inputs overlap or are kept, and must write none of those. It is also told which are
views, because autograd lays out the gradient of a tensor written through a view as that of the view's base.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...dependency import ConfigError
from ..transport.payload import Payload, Tree, distinct_tensors, is_taken_apart, parts_of
from .inner_state import BOXES, MOST_INSIDE

#: tensors with more elements in one storage count as overlapping without a look at each element
_MOST_ELEMENTS = 2**22
#: so many forwards are searched for layers that keep their output
_LOOKS = 2
_HOLDERS: tuple[type[Any], ...] = (tuple, *BOXES)


class Aliased(NamedTuple):
    """A tree whose tensors overlap or are views; it travels between stages in place of the tree."""

    tree: Tree
    #: indices of the payload's tensors that overlap, by group; a group of one is kept by a layer
    groups: tuple[tuple[int, ...], ...]
    #: indices of those that require a gradient and are views
    views: tuple[int, ...] = ()


def without_aliases(tree: Tree) -> Tree:
    """Return the tree itself."""
    return tree.tree if type(tree) is Aliased else tree


class KeptOutputs:
    """Observes in the first forwards whether layers keep outputs of their stage in attributes, as memories do.

    Args:
        modules: all modules of the stage.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        #: grad mode -> how many more forwards to search; never less while layers keep something
        self._looks = {True: _LOOKS, False: _LOOKS}

    def kept(self, payload: Payload) -> list[int]:
        """Return the indices of the payload's tensors whose memory a layer keeps."""
        trains = torch.is_grad_enabled()
        if not self._looks[trains]:
            return []
        addresses = {address(tensor) for module in self._modules for tensor in _held(vars(module).values())} - {0}
        found = [number for number, tensor in enumerate(payload.tensors) if address(tensor) in addresses]
        self._looks[trains] = _LOOKS if found else self._looks[trains] - 1
        return found


def _held(values: Iterable[Any], inside: bool = True) -> Iterable[Tensor]:
    """Yield the tensors among `values`, and inside of the containers among them, one level deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif inside and isinstance(value, _HOLDERS) and len(value) <= MOST_INSIDE:
            yield from _held(value.values() if isinstance(value, dict) else value, False)


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; a unique negative number if it has none or is not strided."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)
    except RuntimeError:  # a stand-in for a tensor of another stage
        return -id(tensor)


def with_aliases(payload: Payload, tree: Tree, kept: Collection[int] = ()) -> Payload:
    """Return the payload of `tree`, marked with which tensors overlap, are views or are `kept` (indices)."""
    groups = _overlapping(payload) if len(payload.tensors) > 1 else ()
    groups += tuple([(number,) for number in kept])
    views, number = [], 0
    for tensor in distinct_tensors(tree):
        if tensor.requires_grad and tensor._is_view():
            views.append(number)
        number += len(parts_of(tensor)) if is_taken_apart(tensor) else 1
    if not (groups or views):
        return payload
    return Payload(payload.tensors, Aliased(payload.skeleton, groups, tuple(views)))


def _overlapping(payload: Payload) -> tuple[tuple[int, ...], ...]:
    by_address: dict[int, list[int]] = {}
    for number, tensor in enumerate(payload.tensors):
        if tensor.layout is torch.strided and tensor.numel():
            by_address.setdefault(address(tensor), []).append(number)
    if len(by_address) == len(payload.tensors):
        return ()
    alike = [[payload.tensors[number] for number in numbers] for numbers in by_address.values()]
    return tuple([tuple(n) for n, some in zip(by_address.values(), alike, strict=True) if _any_overlap(some)])


def _any_overlap(tensors: Sequence[Tensor]) -> bool:
    return any(_overlap(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


def _overlap(a: Tensor, b: Tensor) -> bool:
    apart = b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size()
    if a.dtype != b.dtype or max(a.numel(), b.numel()) > _MOST_ELEMENTS:
        return True
    return _meet(tuple(a.shape), a.stride(), tuple(b.shape), b.stride(), apart // a.element_size())


@lru_cache(maxsize=256)
def _meet(
    shape: tuple[int, ...], strides: tuple[int, ...], other: tuple[int, ...], others: tuple[int, ...], apart: int
) -> bool:
    """Return whether two tensors share an element; the second begins `apart` elements behind the first."""
    return bool(torch.isin(_places(shape, strides), _places(other, others) + apart).any())


def _places(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places


def refuse_writes(groups: Iterable[Sequence[int]], written: Sequence[int]) -> None:
    """Raise if one of the inputs `written` (indices) is in one of `groups`.

    Raises:
        ConfigError: one is.
    """
    if any(number in group for group in groups for number in written):
        raise ConfigError(
            "a layer writes in place what its stage was handed together with a view of it, or what a layer of the "
            "stage before keeps in an attribute: behind a cut the two no longer share memory; hand on a copy, by "
            ".clone(), leave out the change in place, or choose a split that keeps the layers together"
        )
