"""Tensors that do not fill their memory: expanded ones repeat elements, slices leave some out.

Kernels choose their way through a tensor, and so the order of a sum, by strides: the sum of an expanded column
has other last bits than that of its contiguous copy. So a tensor keeps its strides wherever it goes, but each
of its elements travels once: as a dense tensor, which is unfolded again where it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

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
