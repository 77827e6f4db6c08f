"""Payloads between workers: trees of tensors and plain values that describe themselves.

A tree is made of tensors, None, bool, numbers, strings, tuples, lists and dicts. It travels as a flat list of tensors
and a skeleton. In the skeleton a tensor is its place in the list, and whether a gradient is owed for it. Shapes and
structure may change with every microbatch; nothing is declared. A tensor that the tree holds in several places travels
once and stays one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dependency import Malformed

Sizes = tuple[int, ...]
#: a tensor with larger gaps becomes dense: its memory would be too much larger than its contents
_MOST_GAPS = 2**16
#: so does a tensor with overlapping windows, if the memory that they span is too much larger
_MOST_BETWEEN = 64


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return over how many elements of memory a tensor reaches; fewer than it has if it repeats some."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has each element of its part of memory, and once."""
    if tensor.is_contiguous():
        return True
    form = folded(tensor.shape, tensor.stride())
    return form.shape == tensor.shape and form.strides == tensor.stride()


class Folded(NamedTuple):
    """A view with each element of a tensor once."""

    shape: Sizes
    #: strides within the memory of the tensor, and when it is dense
    there: Sizes
    strides: Sizes


@lru_cache(1000)
def folded(shape: Sizes, strides: Sizes) -> Folded:
    """Return the view with each element of a tensor with this shape and these strides once.

    >>> folded((5, 4), (0, 1)), folded((6, 2), (4, 2))
    (Folded(shape=(1, 4), there=(0, 1), strides=(0, 1)), Folded(shape=(6, 2), there=(4, 2), strides=(2, 1)))
    """
    if 0 in shape:
        return Folded(shape, strides, strides)
    once = tuple([size if stride else 1 for size, stride in zip(shape, strides, strict=True)])
    dense, count, reach = list(strides), 1, 1
    for stride, place in sorted([(strides[place], place) for place, size in enumerate(once) if size > 1]):
        if stride < reach:  # windows that overlap: all that they reach over
            return Folded((extent(shape, strides),), (1,), (1,))
        dense[place], count, reach = count, count * once[place], reach + stride * (once[place] - 1)
    return Folded(once, strides, tuple(dense))


def fold(tensor: Tensor) -> Tensor:
    """Return the dense tensor that has each element of `tensor` once, in the same memory if it has no gaps."""
    if is_dense(tensor):
        return tensor
    shape, there, strides = folded(tensor.shape, tensor.stride())
    once = tensor.as_strided(shape, there)
    return once if there == strides else once.new_empty_strided(shape, strides).copy_(once)


def unfold(dense: Tensor, shape: Sizes, strides: Sizes) -> Tensor:
    """Return a tensor with this shape and these strides, from a result of `fold`."""
    form = folded(shape, strides)
    if form.there != form.strides:  # gaps, which are never read
        with_gaps = dense.new_empty(extent(shape, strides))
        with_gaps.as_strided(form.shape, form.there).copy_(dense)
        dense = with_gaps
    return dense.as_strided(shape, strides)


def is_sparing(shape: Sizes, strides: Sizes) -> bool:
    """Return whether the memory of a tensor with these is small enough, for its contents, to be unfolded."""
    count = prod(folded(shape, strides).shape)
    return count <= _MOST_BETWEEN * prod(shape) and extent(shape, strides) <= _MOST_GAPS * count


#: any nesting of tensors and plain values
Tree = Any
_TOO_DEEP = "tuples, lists or dicts that contain themselves, or lie hundreds deep in each other, cannot travel"
#: of tensors that travel as their parts
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
#: the same by the names that travel
SPARSE = {str(layout): layout for layout in _SPARSE}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


class TensorHolder(ABC):
    """An object with tensors in a batch: it moves to a device with the batch, but not between workers."""

    @abstractmethod
    def mapped(self, change: Callable[[Tensor], Any]) -> TensorHolder:
        """Return the same with every tensor replaced by `change(tensor)`."""


class Place(NamedTuple):
    """Stands in the skeleton where the tensor `number` was."""

    number: int
    #: whether the consumer owes a gradient for it
    owes_grad: bool


class Sparse(NamedTuple):
    """Stands in the skeleton where a sparse tensor was."""

    layout: str
    #: its parts, places and plain values
    parts: tuple[Any, ...]
    owes_grad: bool


@dataclass(slots=True)
class Payload:
    """A tree taken apart for the road."""

    tensors: list[Tensor]
    skeleton: Tree

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements that travel: each once, however often a tensor repeats it."""
        return sum([tensor.nbytes if tensor.is_contiguous() else _num_bytes(tensor) for tensor in self.tensors])


def _num_bytes(tensor: Tensor) -> int:
    return prod(folded(tensor.shape, tensor.stride()).shape) * tensor.itemsize


@dataclass(slots=True)
class Staying(Payload):
    """A payload that stays on its device until its way to a consumer is known."""

    #: when it is there
    event: Any
    #: has it brought to the host, by its second argument if that works; then calls the first one with the payload
    #: there, in another thread
    leave: Callable[[Callable[[Payload], object], Callable[[], Laid | None] | None], None]


@dataclass(slots=True)
class Laid(Payload):
    """A payload of a device in a block of memory that one consumer's device reads.

    Its tensors lie in the block if that is memory of the host.
    """

    form: bytes
    block: Any
    #: when it is there
    event: Any

    def unfold(self) -> Payload:
        """Return the payload when it is there."""
        return self


def pack(tree: Tree) -> Payload:
    """Take `tree` apart. The tensors are detached: no autograd graph ever travels.

    Raises:
        TypeError: a value that is none of the supported types; the text names its place.
    """
    if type(tree) is Tensor and tree.layout is torch.strided:  # as most are
        return Payload([tree.detach()], Place(0, tree.requires_grad))
    if type(tree) is tuple and len(tree) == 1 and type(tree[0]) is Tensor and tree[0].layout is torch.strided:
        return Payload([tree[0].detach()], (Place(0, tree[0].requires_grad),))
    if _is_flat(tree):
        places = tuple([Place(number, part.requires_grad) for number, part in enumerate(tree)])
        return Payload([part.detach() for part in tree], places)
    tensors: list[Tensor] = []
    found_at: dict[int, Place | Sparse] = {}

    def place(tensor: Tensor) -> Place | Sparse:
        if id(tensor) not in found_at:
            is_sparse = tensor.layout in _SPARSE
            found_at[id(tensor)] = apart(tensor) if is_sparse else append(tensor.detach(), tensor.requires_grad)
        return found_at[id(tensor)]

    def apart(tensor: Tensor) -> Sparse:
        # Not coalesced: the receiver chooses the order of sums.
        parts = _map(_made_of(tensor), (Tensor,), lambda part: append(part, False), "output")
        return Sparse(str(tensor.layout), parts, tensor.requires_grad)

    def append(tensor: Tensor, owes_grad: bool) -> Place:
        tensors.append(tensor)
        return Place(len(tensors) - 1, owes_grad)

    return Payload(tensors, _map(tree, (Tensor,), place, "output"))


def _is_flat(tree: Tree) -> bool:
    """Return whether `tree` is a tuple of different tensors, as gradients are."""
    if type(tree) is not tuple or len(set(map(id, tree))) < len(tree):
        return False
    return all([type(part) is Tensor and part.layout is torch.strided for part in tree])


def as_leaf(tensor: Tensor, owes_grad: bool) -> Tensor:
    """Return a new tensor on the same memory: the outbox, or another worker's thread, may hold the original."""
    return tensor.detach().requires_grad_(owes_grad)


def unpack(payload: Payload, take: Callable[[Tensor, bool], Tensor] = as_leaf) -> Tree:
    """Put a tree together again; tensors that owe a gradient become fresh leaves of this worker's graph.

    Args:
        take: makes a tensor of the tree from one of the payload and from whether it owes a gradient.
    """
    skeleton = payload.skeleton
    if type(skeleton) is Place:
        return take(payload.tensors[0], skeleton.owes_grad)
    if type(skeleton) is tuple and len(skeleton) == 1 and type(skeleton[0]) is Place:
        return (take(payload.tensors[0], skeleton[0].owes_grad),)
    if type(skeleton) is tuple and {*map(type, skeleton)} == {Place} and len({*skeleton}) == len(skeleton):
        return tuple([take(payload.tensors[place[0]], place[1]) for place in skeleton])
    taken: dict[Place | Sparse, Tensor] = {}

    def restore(place: Place | Sparse) -> Tensor:
        if place not in taken:
            taken[place] = together(place) if isinstance(place, Sparse) else take(payload.tensors[place[0]], place[1])
        return taken[place]

    def together(place: Sparse) -> Tensor:
        part_of = (lambda part: payload.tensors[part.number]) if place.owes_grad else restore
        parts, layout = _map(place.parts, (Place,), part_of, "payload"), SPARSE[place.layout]
        try:
            if layout is torch.sparse_coo:
                *parts, is_coalesced = parts
                tensor = torch.sparse_coo_tensor(*parts, check_invariants=True, is_coalesced=is_coalesced)
            else:
                tensor = torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True)
        except (RuntimeError, TypeError, ValueError) as error:
            raise Malformed(f"malformed message: a sparse tensor whose parts do not fit: {error}") from error
        return take(tensor, True) if place.owes_grad else tensor

    return _map(skeleton, (Place, Sparse), restore, "payload")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a sparse tensor is made of; of another, itself."""
    if tensor.layout not in _SPARSE:
        return [tensor]
    return [part for part in _made_of(tensor) if isinstance(part, Tensor)]


def _made_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the parts of a sparse tensor, as torch pickles it: indices, values, sizes, and whether coalesced."""
    _, (_, parts) = tensor.detach().__reduce_ex__(2)
    made_of: tuple[Any, ...] = parts
    return made_of


def tensors_of(tree: Tree) -> Iterator[Tensor]:
    """Return the tensors of `tree` in the order of `pack`."""
    return iter((tree,)) if isinstance(tree, Tensor) else _tensors_in(tree)


def distinct_tensors(tree: Tree) -> Iterable[Tensor]:
    """Return the tensors of `tree` in that order, each once."""
    return (tree,) if isinstance(tree, Tensor) else dict.fromkeys(_tensors_in(tree))


def _tensors_in(tree: Tree) -> Iterator[Tensor]:
    try:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, (tuple, list)):
            for child in tree:
                if isinstance(child, Tensor):
                    yield child
                else:
                    yield from _tensors_in(child)
        elif isinstance(tree, dict):
            for child in tree.values():
                yield from _tensors_in(child)
    except RecursionError:
        raise TypeError(_TOO_DEEP) from None


def map_tensors(tree: Tree, change: Callable[[Tensor], Any]) -> Tree:
    """Return `tree` with every tensor replaced by `change(tensor)`, called once for each."""
    changed: dict[int, Any] = {}

    def once(found: Tensor | TensorHolder) -> Any:
        if id(found) not in changed:
            changed[id(found)] = change(found) if isinstance(found, Tensor) else found.mapped(change)
        return changed[id(found)]

    return _map(tree, (Tensor, TensorHolder), once, "batch")


def _map(tree: Tree, kinds: tuple[type, ...], change: Callable[[Any], Any], where: str) -> Tree:
    try:
        return _changed(tree, kinds, change)
    except _UnfitError:
        path, kind = next(_unfit(tree, kinds))
        fix = "use tensors, None, bool, numbers, strings, tuples, lists and dicts"
        raise TypeError(f"{where}{path} is a {kind}, which cannot travel between workers; {fix}") from None
    except RecursionError:
        raise TypeError(f"{where}: {_TOO_DEEP}") from None


class _UnfitError(Exception):
    """A tree has something in it that is neither a tensor nor a plain value."""


def tuple_of(kind: type, items: Iterable[Any]) -> Any:
    """Return a tuple of a class, without a call of the class; torch's classes made in C have no other way."""
    return kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items)


def _changed(tree: Tree, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> Tree:
    if isinstance(tree, kinds):
        return change(tree)
    if tree is None or isinstance(tree, _PLAIN):
        return tree
    if isinstance(tree, dict):
        made = {key: _changed(child, kinds, change) for key, child in tree.items()}
        return OrderedDict(made) if isinstance(tree, OrderedDict) else made
    if not isinstance(tree, (tuple, list)):
        raise _UnfitError
    children = [_changed(child, kinds, change) for child in tree]
    kind: Any = type(tree)
    return kind(children) if isinstance(tree, list) else tuple_of(kind, children)


def _unfit(tree: Tree, kinds: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    """Yield (path, type) of the forbidden values in `tree`."""
    if isinstance(tree, (tuple, list, dict)) and not isinstance(tree, kinds + _PLAIN):
        for place, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from ((f"[{place!r}]{path}", kind) for path, kind in _unfit(child, kinds))
    elif tree is not None and not isinstance(tree, kinds + _PLAIN):
        yield "", type(tree).__qualname__


def split_rows(tree: Tree, parts: int, rows: int | None = None) -> list[Tree]:
    """Split the tensors of `tree` along dimension 0 into `parts` pieces that differ by at most one row.

    Every piece gets plain values unchanged, and also tensors of another number of rows, if `rows` is given.
    """
    if isinstance(tree, Tensor) and (rows is None or (tree.dim() and tree.shape[0] == rows)):
        return list(tree.tensor_split(parts))
    split = [t for t in tensors_of(tree) if rows is None or (t.dim() and t.shape[0] == rows)]
    pieces = {id(tensor): tensor.tensor_split(parts) for tensor in split}

    def piece(i: int) -> Tree:
        return map_tensors(tree, lambda tensor: pieces[id(tensor)][i] if id(tensor) in pieces else tensor)

    return [piece(i) for i in range(parts)]


def rows_of_parts(rows: int, parts: int) -> list[range]:
    """Return the rows of each piece that `split_rows` makes of a number of rows."""
    least, more = divmod(rows, parts)
    begins = [number * least + min(number, more) for number in range(parts + 1)]
    return [range(*each) for each in pairwise(begins)]


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a tree, each with the name that it has in a dict."""
    if isinstance(tree, (tuple, list, dict)):
        for key, each in tree.items() if isinstance(tree, dict) else ((name, each) for each in tree):
            yield from named_leaves(each, str(key))
    else:
        yield name, tree


def shapes_in(tree: Tree) -> str:
    """Write the types and shapes of all tensors, or that there is none."""
    named = [(f"{name} " if name else "", each) for name, each in named_leaves(tree) if isinstance(each, Tensor)]
    found = ", ".join(f"{name}{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in named)
    return found or "no tensor (numpy's arrays and lists of numbers are none; torch.as_tensor makes one)"
