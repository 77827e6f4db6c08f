"""Any map-style dataset, also of another library: the dataset keeps the samples, and the loader gives numbers.

Samples may draw random numbers, as crops and flips do. The numbers depend on the epoch and the sample alone, because
several workers may each read a part of a sample, such as an image and its mask. Such samples are made on the calling
thread: they draw from the process's generators, as layers and the user's loop do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from ..dependency import ConfigError
from ..workers.compute.modules.randomness import preserved, python_state, seed_process
from ..workers.transport.payload import Tree, tensors_of
from .bijection import Numbers, key
from .source import ALL, Busy, Source, Wanted, fields

T = TypeVar("T")

_CHUNKS = 4096

Keys = str | Sequence[str]


def dataset(
    samples: Any,
    *,
    inputs: Keys | None = None,
    targets: Keys | None = None,
    chunk: int | None = None,
    identity: str | None = None,
) -> Source:
    """Return a map-style dataset (`len(samples)`, `samples[i]`) as a source; torch's, `datasets`', grain's alike.

    Args:
        inputs, targets: a key of samples that are dicts, or several keys, which give a dict; other samples are pairs.
        chunk: number of consecutive samples that are cheap to read together, such as the rows of a file; by default all
            samples are equally near, and the shuffle is over all.
        identity: distinguishes datasets of the same length; the class by default.

    Samples may draw from torch's, Python's and numpy's global generators, to crop or to flip. Each sample draws other
    numbers in every epoch, the same on every worker and in a run that is resumed.

    Raises:
        ConfigError: `samples` is no map-style dataset, is empty, or its samples are no pairs.
    """
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ConfigError(f"dataset {type(samples).__name__}: must have a length and samples[i]; iterable ones do not")
    if len(samples) == 0:
        raise ConfigError(f"dataset {type(samples).__name__}: has no samples")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk {chunk}: must be at least 1 sample")
    return Mapped(samples, (inputs, targets), chunk, identity)


class Mapped(Source):
    """A dataset that holds itself."""

    keeps_rows = False

    def __init__(
        self, samples: Any, keys: tuple[Any, Any] = (None, None), chunk: int | None = None, identity: str | None = None
    ) -> None:
        self.samples, self.busy, self._keys = samples, Busy(), keys
        self.name = type(samples).__name__
        count = len(samples)
        self.each = chunk or -(-count // _CHUNKS)
        self.sizes = np.full(-(-count // self.each), self.each, np.int64)
        self.sizes[-1] = count - self.each * (len(self.sizes) - 1)
        (first,) = drawn(self.make, [0], 0)
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors_of(default_collate([first]))) or 1
        # A dataset without chunks holds its samples itself, so it fits into any memory limit.
        self.num_bytes = self.sizes * self.sample_bytes if chunk else np.ones(len(self.sizes), np.int64)
        self.identity = f"{count} samples of {identity or self.name}"

    def make(self, number: int, wanted: Wanted = ALL) -> tuple[Any, Any]:
        """Return a sample as (inputs, target), as far as wanted."""
        sample = self.samples[number]
        if isinstance(sample, dict):
            try:
                parts = [fields(sample, said) for said in self._keys]
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"dataset {self.name}: its samples have {', '.join(map(repr, sample))}; name inputs= and targets="
                ) from error
        elif isinstance(sample, (tuple, list)) and len(sample) == 2:
            parts = list(sample)
        else:
            raise ConfigError(f"dataset {self.name}: a sample is a {type(sample).__name__}; must be (inputs, target)")
        return wanted.of(parts)

    @cached_property
    def draws(self) -> bool:
        with preserved():
            before, others = torch.get_rng_state(), python_state()
            self.make(0)
            return not torch.equal(before, torch.get_rng_state()) or python_state() != others

    def load(self, chunk: int, wanted: Wanted = ALL) -> int:
        return chunk * self.each

    def rows(self, held: int, numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        make, places = partial(self.make, wanted=wanted), (held + numbers).tolist()
        pairs = drawn(make, places, keyed)
        if self.keeps_rows:
            return pairs
        return wanted.of(zip(*pairs, strict=True), lambda side: default_collate(list(side)))

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        return wanted.of(zip(*rows, strict=True), list) if self.keeps_rows else super().batch(rows, wanted)


def drawn(make: Callable[[int], T], numbers: Iterable[int], keyed: int | None) -> list[T]:
    """Return `make(number)` for each number, with random numbers keyed by `keyed` and the number.

    Args:
        keyed: None: samples draw no random numbers.
    """
    if keyed is None:
        return [make(number) for number in numbers]
    made = []
    with preserved():
        for number in numbers:
            seed_process(key(keyed, number) >> 1)  # generators take 63 bits
            made.append(make(number))
    return made
