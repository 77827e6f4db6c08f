"""Tensors of one stage's output that share memory: with one another, with what a layer keeps, or are views.

Inside one model a layer that writes one of them writes the others too. Behind a cut they are apart. So the next stage
is told which overlap or are kept, and must write none of those; and which are views, since autograd lays out the
gradient of what is written through a view as what the view is of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..transport.payload import Payload, Tree, distinct_tensors, parts_of
from .inner_state import BOXES, MOST_INSIDE

#: of more elements it is not found out whether they overlap or only lie among each other
_MOST_ELEMENTS = 2**22
#: so many forwards are looked at for layers that keep what they hand on
_LOOKS = 2
_HOLDERS: tuple[type[Any], ...] = (tuple, *BOXES)


class Sharing(NamedTuple):
    """Stands around a tree whose tensors overlap, or are views; it travels with them."""

    tree: Tree
    #: numbers of tensors of the payload that overlap; one alone is kept by a layer
    groups: tuple[tuple[int, ...], ...]
    #: and of those that owe a gradient and are views, to autograd
    views: tuple[int, ...] = ()


def alone(tree: Tree) -> Tree:
    """Return a tree without what stands around it."""
    return tree.tree if type(tree) is Sharing else tree


class Keepers:
    """Finds out, by the first forwards, whether layers keep in attributes what their stage hands on, as memories do.

    Args:
        modules: all that compute.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        #: whether gradients are wanted -> how many more forwards are looked at; where layers keep something, all are
        self._looks = {True: _LOOKS, False: _LOOKS}

    def kept(self, payload: Payload) -> list[int]:
        """Return the numbers of the payload's tensors whose memory a layer keeps, too."""
        trains = torch.is_grad_enabled()
        if not self._looks[trains]:
            return []
        addresses = {address(tensor) for module in self._modules for tensor in _held(vars(module).values())} - {0}
        found = [number for number, tensor in enumerate(payload.tensors) if address(tensor) in addresses]
        self._looks[trains] = _LOOKS if found else self._looks[trains] - 1
        return found


def _held(values: Iterable[Any], inside: bool = True) -> Iterable[Tensor]:
    """Yield the tensors among values, and in the lists and the like among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif inside and isinstance(value, _HOLDERS) and len(value) <= MOST_INSIDE:
            yield from _held(value.values() if isinstance(value, dict) else value, False)


def address(tensor: Tensor) -> int:
    """Return where the elements of a tensor begin; a number of its own, if it has none or keeps them otherwise."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)
    except RuntimeError:  # what only stands there for a tensor of another stage
        return -id(tensor)


def told(payload: Payload, tree: Tree, kept: Collection[int] = ()) -> Payload:
    """Return a payload of `tree` that tells which of its tensors overlap, which are views, and which are kept."""
    groups = _overlapping(payload) if len(payload.tensors) > 1 else ()
    groups += tuple([(number,) for number in kept])
    views, number = [], 0
    for tensor in distinct_tensors(tree):
        if tensor.requires_grad and tensor._is_view():
            views.append(number)
        number += len(parts_of(tensor)) if tensor.layout is torch.sparse_coo else 1
    if not (groups or views):
        return payload
    return Payload(payload.tensors, Sharing(payload.skeleton, groups, tuple(views)))


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
    """Tell whether two tensors have an element in common; the second begins so many elements behind the first."""
    return bool(torch.isin(_places(shape, strides), _places(other, others) + apart).any())


def _places(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places


def refuse(groups: Iterable[Sequence[int]], written: Sequence[int]) -> None:
    """Refuse that tensors are written, by their numbers, that overlapped with others.

    Raises:
        RuntimeError: one has been.
    """
    if any(number in group for group in groups for number in written):
        raise RuntimeError(
            "a layer writes in place what its stage was handed together with a view of it, or what a layer of the "
            "stage before keeps in an attribute: behind a cut the two no longer share memory; hand on a copy, by "
            ".clone(), leave out the change in place, or choose a split that keeps the layers together"
        )
