"""Samples that draw random numbers, as crops and flips do: what is drawn depends on the epoch and the sample alone.

Several workers may read a sample, such as an image and its mask, each its part; and a run that is resumed reads on in
the middle. They all draw the same. Such samples are made on the thread that asks for them: the generators that they
draw from are the process's, and layers and the user's loop draw from them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from ..workers.compute.randomness import preserved, python_state, seed_process
from .bijection import key

T = TypeVar("T")


def draws(make: Callable[[], object]) -> bool:
    """Tell whether `make` draws from generators that the process has for everybody, which stay as they were."""
    with preserved():
        before, others = torch.get_rng_state(), python_state()
        make()
        return not torch.equal(before, torch.get_rng_state()) or python_state() != others


def drawn(make: Callable[[int], T], numbers: Iterable[int], keyed: int | None) -> list[T]:
    """Return what `make` makes of each number, with random numbers of the key and that number.

    Args:
        keyed: None: nothing is drawn.
    """
    if keyed is None:
        return [make(number) for number in numbers]
    made = []
    with preserved():
        for number in numbers:
            seed_process(key(keyed, number) >> 1)  # generators take 63 bits
            made.append(make(number))
    return made
