"""A caller's `autocast`, as torch wants it to be used: around forwards and losses, not around backward and updates.

Torch keeps the weights that it has cast until the outermost `autocast` of a thread is left, in one table a process. So
it is emptied only while no thread computes: a weight that a forward uses twice is cast once, or the sum of its two
gradients would have other bits. And casts that were made without gradients must not be used with them.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from .randomness import computing

_GPU = (torch.accelerator.current_accelerator() or torch.device("cuda")).type
#: by whether autocast is on for a CPU and for the accelerator of this torch
_ENABLED = {(False, False): (), (True, False): ("cpu",), (False, True): (_GPU,), (True, True): ("cpu", _GPU)}


def enabled() -> tuple[str, ...]:
    """Return the devices with autocast on in this thread."""
    return _ENABLED[torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled(_GPU)]


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


def without() -> AbstractContextManager[Any]:
    """Return a context without casts, as behind the caller's `autocast`; no other thread computes during it.

    Weights are cast anew from then on, as if each microbatch entered `autocast`: a checkpoint that computes again in
    backward must not use casts that were made without gradients.
    """
    kinds = enabled()
    return _without(kinds) if kinds else computing


@contextmanager
def _without(kinds: Iterable[str]) -> Iterator[None]:
    with computing, ExitStack() as stack:
        torch.clear_autocast_cache()
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
