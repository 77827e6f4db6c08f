"""Tensors that do not fill their memory: expanded ones repeat elements, slices leave some out.

Kernels choose by strides how they go through a tensor, and so in which order they add up: the sum of an expanded
column has other last bits than that of its contiguous copy. So a tensor keeps its strides wherever it goes, but each
of its elements travels once: as a dense tensor, which is spread out again where it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from torch import Tensor

Sizes = tuple[int, ...]
#: a tensor with larger gaps becomes dense: nobody shall take memory that is so much more than what is in it
_MOST_GAPS = 2**16


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return over how many elements of memory a tensor reaches; fewer than it has if it repeats some."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor has each element of its part of memory, and once."""
    return tensor.is_contiguous() or folded(tensor.shape, tensor.stride()) == (tensor.shape, tensor.stride())


@lru_cache(1000)
def folded(shape: Sizes, strides: Sizes) -> tuple[Sizes, Sizes]:
    """Return shape and strides of the dense tensor that has each element of a tensor with these, once.

    >>> folded((5, 4), (0, 1)), folded((6, 2), (4, 2)), folded((2, 3), (1, 2))
    (((1, 4), (0, 1)), ((6, 2), (2, 1)), ((2, 3), (1, 2)))
    """
    if 0 in shape:
        return shape, strides
    once = tuple([size if stride else 1 for size, stride in zip(shape, strides, strict=True)])
    dense, count, reach = list(strides), 1, 1
    for stride, place in sorted([(strides[place], place) for place, size in enumerate(once) if size > 1]):
        if stride < reach:  # windows that overlap: all that they are made of
            return (span(shape, strides),), (1,)
        dense[place], count, reach = count, count * once[place], reach + stride * (once[place] - 1)
    return once, tuple(dense)


def fold(tensor: Tensor) -> Tensor:
    """Return the dense tensor that has each element of `tensor` once, in the same memory if it has no gaps."""
    shape, strides = folded(tensor.shape, tensor.stride())
    if len(shape) != tensor.dim():
        return tensor.as_strided(shape, strides)
    once = tensor.as_strided(shape, tensor.stride())
    return once if once.stride() == strides else once.new_empty_strided(shape, strides).copy_(once)


def spread(dense: Tensor, shape: Sizes, strides: Sizes) -> Tensor:
    """Return a tensor with this shape and these strides, from what `fold` has made of one."""
    once, own = folded(shape, strides)
    if len(once) == len(shape) and own != strides:  # gaps, in which nothing is ever read
        with_gaps = dense.new_empty(span(shape, strides))
        with_gaps.as_strided(once, strides).copy_(dense)
        dense = with_gaps
    return dense.as_strided(shape, strides)


def is_sparing(shape: Sizes, strides: Sizes) -> bool:
    """Tell whether a tensor with these takes little enough memory, for what is in it, to be spread out."""
    once, _ = folded(shape, strides)
    return span(shape, strides) <= (_MOST_GAPS * prod(once) if len(once) == len(shape) else prod(shape))
