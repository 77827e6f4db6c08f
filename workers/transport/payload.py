"""What travels between workers: trees of tensors and plain values that describe themselves.

A tree is made of tensors, None, bool, numbers, strings, tuples, lists and dicts. It travels as a flat list
of tensors and a skeleton in which each tensor is replaced by its place in that list and by whether a
gradient is owed for it. Shapes and structure may change with every microbatch; nothing is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: any nesting of tensors and plain values
Tree = Any


class Place(NamedTuple):
    """Stands in the skeleton where the tensor `index` was."""

    number: int
    #: whether the consumer owes a gradient for it
    owes_grad: bool


@dataclass(frozen=True, slots=True)
class Payload:
    """A tree taken apart for the road."""

    tensors: list[Tensor]
    skeleton: Tree

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum([_num_sparse_bytes(tensor) if tensor.is_sparse else tensor.nbytes for tensor in self.tensors])


def _num_sparse_bytes(tensor: Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes


def pack(tree: Tree) -> Payload:
    """Take `tree` apart. The tensors are detached: no autograd graph ever travels.

    Raises:
        TypeError: a value that is none of the supported types; the text says where.
    """
    tensors: list[Tensor] = []

    def place(tensor: Tensor) -> Place:
        tensors.append(tensor.detach())
        return Place(len(tensors) - 1, tensor.requires_grad)

    return Payload(tensors, _map(tree, Tensor, place, "output"))


def unpack(payload: Payload) -> Tree:
    """Put a tree together again; tensors that owe a gradient become fresh leaves of this worker's graph."""

    def leaf(place: Place) -> Tensor:
        # A new tensor on the same storage: the outbox, or another worker's thread, may hold the original.
        return payload.tensors[place.number].detach().requires_grad_(place.owes_grad)

    return _map(payload.skeleton, Place, leaf, "payload")


def compact(tensor: Tensor) -> Tensor:
    """Copy a tensor that is a view of a larger storage, because RPC carries whole storages."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()  # keeps the strides of dense tensors, so kernels choose the same path after it


def tensors_of(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors of `tree` in the order in which `pack` numbers them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for child in tree:
            yield from tensors_of(child)
    elif isinstance(tree, dict):
        for child in tree.values():
            yield from tensors_of(child)


def map_tensors(tree: Tree, change: Callable[[Tensor], Any]) -> Tree:
    """Return `tree` with every tensor replaced by `change(tensor)`."""
    return _map(tree, Tensor, change, "batch")


def _map(tree: Tree, kind: type, change: Callable[[Any], Any], where: str) -> Tree:
    if isinstance(tree, kind):
        return change(tree)
    if tree is None or isinstance(tree, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size)):
        return tree
    if isinstance(tree, (tuple, list)):
        children = [_map(child, kind, change, f"{where}[{i}]") for i, child in enumerate(tree)]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    if isinstance(tree, dict):
        return {key: _map(child, kind, change, f"{where}[{key!r}]") for key, child in tree.items()}
    raise TypeError(
        f"{where} is a {type(tree).__qualname__}, which cannot travel between workers; use tensors, None, "
        "bool, numbers, strings, tuples, lists and dicts"
    )


def split_rows(tree: Tree, parts: int) -> list[Tree]:
    """Split the tensors of `tree` along dimension 0 into `parts` pieces that differ by at most one row.

    Plain values go to every piece unchanged.
    """
    pieces = [tensor.tensor_split(parts) for tensor in tensors_of(tree)]
    split = []
    for i in range(parts):
        own = iter([piece[i] for piece in pieces])
        split.append(map_tensors(tree, lambda _, own=own: next(own)))  # type: ignore[misc]
    return split


def num_rows(tree: Tree) -> int:
    """Return the size of dimension 0, which all tensors of a batch share.

    Raises:
        ValueError: there is no tensor, a tensor has no dimension, or the sizes differ.
    """
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(tree)}
    if len(sizes) != 1 or None in sizes:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(tree)) or "no tensor"
        raise ValueError(f"a batch needs tensors that agree in dimension 0; found {found}")
    return int(sizes.pop() or 0)


def num_tokens(inputs: Tree) -> int:
    """Return how many whole numbers the first of the inputs has, such as bytes or words; 0 if they are not whole."""
    first = next(iter(tensors_of(inputs)), None)
    return 0 if first is None or first.is_floating_point() or first.is_complex() else first.numel()
