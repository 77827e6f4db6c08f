"""The random numbers of all slices of a sequence, for a forward on the whole sequence.

Each slice draws numbers keyed by its index, so a slice costs no more than its share. A whole forward that must have the
same numbers, as a reference has, draws the part of every slice from that slice's generator:

    slice 0 draws [rows, 4, width] ─┐
    slice 1 draws [rows, 4, width] ─┼─ [rows, 12, width] of the whole
    slice 2 draws [rows, 4, width] ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..transport.payload import tensors_of
from .randomness import PYTHON_SEEDS
from .torch_internals import OperatorMode

_ATEN = torch.ops.aten
_SOFTMAX = {_ATEN._softmax.default, _ATEN._safe_softmax.default}
_LIKE = {_ATEN.rand_like.default, _ATEN.randn_like.default}


class WholeDraws(OperatorMode):
    """Lets operators of a whole forward draw the numbers of its slices.

    The sequence is dimension 1 of the drawn tensor, or 0 as in recurrent networks, or rows and sequence are one
    dimension; behind a softmax it is the last two, of queries and keys. A tensor without the sequence gets the numbers
    of the first slice. An operator that draws and computes in one (attention on a GPU) cannot be divided.

    Args:
        places: beginning and end of each slice in the sequence, and the sequence's length.
        seed: (slice, unit, operation) -> seeds the generators for a slice's next draws.
        generators: the generators that operators draw from.
    """

    def __init__(
        self,
        places: Sequence[tuple[int, int, int]],
        seed: Callable[[int, int, int], None],
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()
        self._places, self._seed, self._generators = places, seed, generators
        #: by slice, the states of the generators behind the slice's last draw
        self._states: list[list[Tensor]] = []
        #: shape of the last scores of attention, until numbers are drawn
        self._scores: torch.Size | None = None

    def seed(self, unit: int, operation: int = 0) -> None:
        """Seed the next draws of all slices; `seed` of a forward."""
        self._states = []
        for number in reversed(
            range(len(self._places))
        ):  # the first slice's numbers are for draws that are not divided
            self._seed(number, unit, operation)
            self._states.insert(0, self._current())

    def _current(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_of(args))
        divided = len(given) == 1 and given[0] is args[0] and type(given[0]) is Tensor and bool(self._states)
        if not draws(func, args, kwargs) or not divided:
            found = func(*args, **kwargs)
            self._scores = found.shape if func in _SOFTMAX else self._scores
            return found
        takes, self._scores = self._takes(args[0].shape), None
        if not takes or not (_writes_first(func) or func in _LIKE or func is _ATEN.native_dropout.default):
            return func(*args, **kwargs)
        return self._joined(func, args, kwargs, takes)

    def _joined(self, func: Any, args: Any, kwargs: Any, takes: Sequence[Callable[[Tensor], Tensor]]) -> Any:
        """Return the result of a drawing operator, drawn slice by slice."""
        like, drops = args[0], func is _ATEN.native_dropout.default
        whole, mask = torch.zeros_like(like), torch.ones_like(like, dtype=torch.bool) if drops else None
        before = self._current()
        for states, take in zip(self._states, takes, strict=True):
            self._set(states)
            part = take(whole)
            own = _empty(like, part.shape if part.dim() == like.dim() else part.flatten(0, 1).shape)
            drawn = func(own.fill_(1) if drops else own, *args[1:], **kwargs)
            states[:] = self._current()
            part.copy_((drawn[0] if drops else drawn).reshape(part.shape))
            if mask is not None:
                take(mask).copy_(drawn[1].reshape(part.shape))
        self._set(before)
        return like.copy_(whole) if _writes_first(func) else (like * whole, mask) if drops else whole

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _takes(self, shape: torch.Size) -> list[Callable[[Tensor], Tensor]]:
        """Return, by slice, a function that takes the slice's part of a whole tensor; none without a sequence."""
        total, ranges = self._places[0][2], [(begin, end) for begin, end, _ in self._places]
        if shape == self._scores and shape[-2:] == (total, total):
            return [partial(_scores, begin=begin, end=end) for begin, end in ranges]
        for dim in (1, 0):
            if shape[dim : dim + 1] == (total,):
                return [partial(torch.narrow, dim=dim, start=begin, length=end - begin) for begin, end in ranges]
        if shape and shape[0] % total == 0:
            return [partial(_tokens, total=total, begin=begin, end=end) for begin, end in ranges]
        return []


class NotedDraws(OperatorMode):
    """Records whether an operator draws numbers, other than a seed for the generators of Python."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seeds = func is _ATEN.randint.default and args[0] == PYTHON_SEEDS
        self.found = self.found or (draws(func, args, kwargs or {}) and not seeds)
        return func(*args, **(kwargs or {}))


def _scores(whole: Tensor, begin: int, end: int) -> Tensor:
    return whole[..., begin:end, :end]


def _tokens(whole: Tensor, total: int, begin: int, end: int) -> Tensor:
    rows: Tensor = whole.unflatten(0, (-1, total))
    return rows[:, begin:end]


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator draws: an attention draws if it is to drop out."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [each.name for each in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


def _writes_first(func: Any) -> bool:
    """Return whether an operator writes to its first argument; torch before 2.13 has no tag for that."""
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor with the order of dimensions in memory of another: numbers are drawn in the order of memory."""
    if len(shape) != like.dim():
        return like.new_empty(shape)
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return like.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(like.dim())])
