"""A caller's `autocast`, as torch wants it to be used: around forwards and losses, not around backward and updates.

Torch keeps the weights that it has cast until the outermost `autocast` of a thread is left, in one table a process. So
it is emptied only while no thread computes: a weight that a forward uses twice is cast once, or the sum of its two
gradients would have other bits. And casts that were made without gradients must not be used with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .autograd_graph import children_first
from .randomness import computing

#: by whether autocast is on for a CPU and for a GPU
_ENABLED = {(False, False): (), (True, False): ("cpu",), (False, True): ("cuda",), (True, True): ("cpu", "cuda")}


def enabled() -> tuple[str, ...]:
    """Return the devices for which autocast is on in this thread."""
    return _ENABLED[torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]


def forget_casts() -> None:
    """Let weights be cast anew, as they are by then."""
    if enabled():
        with computing:
            torch.clear_autocast_cache()


@contextmanager
def casting(kinds: Iterable[tuple[str, torch.dtype]], *, cached: bool) -> Iterator[None]:
    """Return a context that casts as another thread does: for each device to a type."""
    with ExitStack() as stack:
        for kind, dtype in kinds:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        try:
            yield
        finally:
            with computing:  # to leave empties the table
                stack.close()


def without(*, forget: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which this thread alone computes and nothing is cast, as behind the caller's `autocast`.

    Args:
        forget: whether weights are cast anew in it.
    """
    kinds = enabled()
    return _without(kinds, forget) if kinds else computing


@contextmanager
def _without(kinds: Iterable[str], forget: bool) -> Iterator[None]:
    with computing, ExitStack() as stack:
        if forget:
            torch.clear_autocast_cache()
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class Casts:
    """Which casts of weights a shard's backward may use."""

    def __init__(self) -> None:
        #: whether forwards leave casts without gradients to backward; None until it has been seen
        self._leaves: bool | None = None

    def look(self, roots: Sequence[Tensor]) -> None:
        """Find out, by the first forward, whether a checkpoint or the like computes again in backward what it has
        computed without gradients: a function that is written in Python."""
        if self._leaves is None and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            nodes = children_first(root.grad_fn for root in roots if root.grad_fn is not None)
            self._leaves = any(isinstance(node, BackwardCFunction) for node in nodes)

    def backward(self) -> AbstractContextManager[Any]:
        """Return a context in which backward runs, as `without`."""
        return without(forget=bool(self._leaves))
