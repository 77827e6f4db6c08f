"""A model run in one process with the pipeline's random draws: keyed by their places in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ..model.observe.placeholder import draws_at_random
from ..model.observe.skeleton import MARK, is_mark, wrap
from ..workers.compute.randomness import python_too
from ..workers.compute.torch_internals import OperatorMode, is_current, without_torch_function
from .shares import Shares


class Keyed(TorchFunctionMode):
    """Lets a model draw its random numbers by the place where it draws: (calls of blocks before, number of the draw).

    Args:
        blocks: names of the blocks; the inside of a block is one place.
        seed: called with the place before numbers are drawn; number 0 is the block.
        shares: the parameters that several stages use.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], seed: Callable[[int, int], None], shares: Shares | None = None
    ) -> None:
        super().__init__()
        self._seed, self._shares = seed, shares
        self._marked = MARK in blocks
        self._blocks = list(dict.fromkeys(model.get_submodule(name) for name in blocks if name != MARK))
        self._position = self._number = self._called = 0
        self._inside = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Keyed:
        self._undo = [wrap(block, self._block) for block in self._blocks]
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()
        # The loss function draws on from where the model has stopped.

    def _begin(self) -> None:
        """Begin a place: Python's and numpy's generators follow torch's."""
        python_too(self._seed)(self._position, 0)

    def _block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        self._inside = True
        own = is_current(self)
        if own:  # under a mode torch leaves its fast paths: attention in evaluation has other bits
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            with nullcontext() if self._shares is None else self._shares.within(self._position):
                result = forward(*args, **kwargs)
        finally:
            self._inside = False
            if own:
                super().__enter__()  # type: ignore[no-untyped-call]
        self._advance()
        return result

    def _advance(self) -> None:
        self._position, self._number, self._called = self._position + 1, 0, 0
        with without_torch_function():
            self._begin()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        if self._marked and is_mark(func):
            return self._advance()
        self._called += 1
        if self._shares is not None:
            args, kwargs = self._shares.given(self._position, self._called, (args, kwargs))
        self._seed(self._position, self._number + 1)
        with _Draws() as draws:
            result = func(*args, **(kwargs or {}))
        if draws.seen:
            self._number += 1
            self._begin()
        self._seed(self._position, 0)
        return result


class _Draws(OperatorMode):
    """Sees whether an operator may draw random numbers, as the observed forward does: by its numbers it need not."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= draws_at_random(func, kwargs or {})
        return func(*args, **(kwargs or {}))
