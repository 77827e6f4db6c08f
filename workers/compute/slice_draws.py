"""Random numbers of a slice of a sequence: its part of those that the whole sequence draws.

whole   draws [rows, 12, width] ─┬─ [:, 0:4] ── slice 0
                                 ├─ [:, 4:8] ── slice 1     each draws all and takes its own,
                                 └─ [:, 8:12] ─ slice 2     so that the next draw begins where the whole's does
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..transport.payload import tensors_of
from .torch_internals import OperatorMode

_ATEN = torch.ops.aten
_SOFTMAX = {_ATEN._softmax.default, _ATEN._safe_softmax.default}
_LIKE = {_ATEN.rand_like.default, _ATEN.randn_like.default}


class SliceDraws(OperatorMode):
    """Sees the operators of a slice's forward, and lets those that draw give its part of the whole sequence's numbers.

    The sequence is dimension 1 of what is drawn, or 0 as in recurrent networks, or rows and sequence are one
    dimension; behind a softmax it is the last two, of queries and keys. Without it all slices draw the same, as the
    whole does. An operator that draws and computes in one (attention on a GPU) draws other numbers for each slice.

    Args:
        number: of the slice.
        place: where it begins and ends in its sequence, and the sequence's length.

    Attributes:
        found: whether anything was drawn.
    """

    def __init__(self, number: int, place: tuple[int, int, int]) -> None:
        super().__init__()
        self._number, self._place, self.found = number, place, False
        #: shape of the last scores of attention, until numbers are drawn
        self._scores: torch.Size | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_of(args))
        if not _draws(func, args, kwargs) or any(type(each) is not Tensor for each in given):
            found = func(*args, **kwargs)  # of the second kind are forwards on shapes
            self._scores = found.shape if func in _SOFTMAX else self._scores
            return found
        self.found = True
        if len(given) == 1 and given[0] is args[0]:
            own, (shape, part) = args[0], self._whole(args[0].shape)
            whole = _empty(own, shape)
            if _writes_first(func):
                return own.copy_(func(whole, *args[1:], **kwargs)[part].reshape(own.shape))
            if func in _LIKE:
                return func(whole, **kwargs)[part].reshape(own.shape)
            if func is _ATEN.native_dropout.default:
                scale, mask = (each[part].reshape(own.shape) for each in func(whole.fill_(1), *args[1:]))
                return own * scale, mask
        for _ in range(self._number):
            torch.manual_seed(int(torch.randint(2**62, ())))
        return func(*args, **kwargs)

    def _whole(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Return the shape of what the whole sequence draws, and where in it the slice's part is."""
        (begin, end, total), scores, self._scores = self._place, self._scores, None
        own = slice(begin, end)
        if shape == scores and shape[-2:] == (end - begin, end):
            return (*shape[:-2], total, total), (..., own, slice(end))
        for dim in (1, 0):
            if shape[dim : dim + 1] == (end - begin,):
                return (*shape[:dim], total, *shape[dim + 1 :]), (*[slice(None)] * dim, own)
        if shape and shape[0] % (end - begin) == 0:
            return (shape[0] // (end - begin), total, *shape[1:]), (slice(None), own)
        return tuple(shape), ()


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator draws: one of attention does if it is to drop out."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [each.name for each in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


def _writes_first(func: Any) -> bool:
    """Tell whether an operator writes to its first argument; torch before 2.13 has no tag that says so."""
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that lies as another does: numbers are drawn in the order of memory."""
    if len(shape) != like.dim():
        return like.new_empty(shape)
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return like.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(like.dim())])
