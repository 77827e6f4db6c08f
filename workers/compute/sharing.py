"""Tensors of one stage's output that overlap in memory: inside one model a layer that writes one writes the others too.

Behind a cut they are apart. So the next stage is told which they are, and its operators are watched: one that reads
what another would have written is refused. Nothing is done where no two tensors overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..transport.payload import Payload, Tree, tensors_of

#: of more elements it is not found out whether they overlap or only lie among each other
_MOST_ELEMENTS = 2**22


class Sharing(NamedTuple):
    """Stands around a tree whose tensors overlap; it travels with them."""

    tree: Tree
    #: numbers of tensors in the order of `tensors_of`, each counted once
    groups: tuple[tuple[int, ...], ...]


def alone(tree: Tree) -> Tree:
    """Return a tree without what stands around it."""
    return tree.tree if type(tree) is Sharing else tree


def told(payload: Payload) -> Payload:
    """Return a payload that tells which of its tensors overlap."""
    by_address: dict[int, list[int]] = {}
    for number, tensor in enumerate(payload.tensors):
        if tensor.layout is torch.strided and tensor.numel():
            by_address.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    if len(by_address) == len(payload.tensors):
        return payload
    alike = [[payload.tensors[number] for number in numbers] for numbers in by_address.values()]
    groups = [tuple(n) for n, some in zip(by_address.values(), alike, strict=True) if _any_overlap(some)]
    return Payload(payload.tensors, Sharing(payload.skeleton, tuple(groups))) if groups else payload


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


class Watch(TorchDispatchMode):
    """Sees what operators read and write of tensors that overlapped.

    Args:
        groups: those that did, as this stage has them.
    """

    def __init__(self, groups: Iterable[Sequence[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: storage -> number of its group
        self._group = {_storage(tensor): number for number, group in enumerate(groups) for tensor in group}
        #: group -> the storage of it that has been written
        self._written: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or a compiler would be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_of([*args, *kwargs.values()]):
            self.use(tensor)
        if func._schema.is_mutable:
            for argument, given in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tensors_of(given):
                        if (group := self._group.get(storage := _storage(tensor))) is not None:
                            self._written[group] = storage
        return func(*args, **kwargs)

    def use(self, tensor: Tensor) -> None:
        """Let it be read, or handed on.

        Raises:
            RuntimeError: what it overlapped with has been written.
        """
        storage = _storage(tensor)
        group = self._group.get(storage)
        if group is not None and self._written.get(group, storage) != storage:
            raise RuntimeError(
                f"a layer writes in place what its stage was handed together with a view of it, and uses the view of "
                f"shape {tuple(tensor.shape)} afterwards: behind a cut they no longer share memory; hand on a copy, by "
                ".clone(), leave out the change in place, or choose a split that keeps the layers together"
            )


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other layouts have none
        return -id(tensor)
