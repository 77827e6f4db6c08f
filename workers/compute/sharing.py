"""Tensors of one stage's output that share memory: with one another, or with what they are views of.

Inside one model a layer that writes one of them writes the others too. Behind a cut they are apart. So the next stage
is told which overlap, and must write none of those; and which are views, since autograd lays out the gradient of what
is written through a view as what the view is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..transport.payload import Payload, Tree, distinct_tensors, parts_of

#: of more elements it is not found out whether they overlap or only lie among each other
_MOST_ELEMENTS = 2**22


class Sharing(NamedTuple):
    """Stands around a tree whose tensors overlap, or are views; it travels with them."""

    tree: Tree
    #: numbers of tensors of the payload that overlap
    groups: tuple[tuple[int, ...], ...]
    #: and of those that owe a gradient and are views, to autograd
    views: tuple[int, ...] = ()


def alone(tree: Tree) -> Tree:
    """Return a tree without what stands around it."""
    return tree.tree if type(tree) is Sharing else tree


def told(payload: Payload, tree: Tree) -> Payload:
    """Return a payload of `tree` that tells which of its tensors overlap, and which are views."""
    groups = _overlapping(payload) if len(payload.tensors) > 1 else ()
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
            by_address.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
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
            "a layer writes in place what its stage was handed together with a view of it: behind a cut the two no "
            "longer share memory; hand on a copy, by .clone(), leave out the change in place, or choose a split that "
            "keeps the layers together"
        )
