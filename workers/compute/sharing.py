"""Outputs of a stage that share memory with one another, or that are views.

Inside one model, writing one of them in place also writes the others; behind a cut they no longer share memory. So the
next stage is told which of its inputs overlap, and must write none of those. It is also told which are
views, because autograd lays out the gradient of a tensor written through a view as that of the view's base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...dependency import ConfigError
from ..transport.payload import Payload, Tree, distinct_tensors, is_taken_apart, parts_of

#: tensors with more elements in one storage count as overlapping without a look at each element
_MOST_ELEMENTS = 2**22


class Aliased(NamedTuple):
    """A tree whose tensors overlap or are views; it travels between stages in place of the tree."""

    tree: Tree
    #: indices of the payload's tensors that overlap, by group
    groups: tuple[tuple[int, ...], ...]
    #: indices of those that require a gradient and are views
    views: tuple[int, ...] = ()


def without_aliases(tree: Tree) -> Tree:
    """Return the tree itself."""
    return tree.tree if type(tree) is Aliased else tree


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; a unique negative number if it has none or is not strided."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)
    except RuntimeError:  # a stand-in for a tensor of another stage
        return -id(tensor)


def with_aliases(payload: Payload, tree: Tree) -> Payload:
    """Return the payload of `tree`, marked with which tensors overlap or are views."""
    groups = _overlapping(payload) if len(payload.tensors) > 1 else ()
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
            "a layer writes in place what its stage was handed together with a view of it: behind a cut the two no "
            "longer share memory; hand on a copy, by .clone(), leave out the change in place, or choose a split that "
            "keeps the layers together"
        )
