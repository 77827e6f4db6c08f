"""Any map-style dataset, that of another library included: it keeps its own samples, and is only told which to give."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import default_collate

from ..dependency import ConfigError
from ..workers.transport.payload import Tree, tensors_of
from .bijection import Numbers
from .source import Busy, Chunk, Source, Wanted

_CHUNKS = 4096


def dataset(
    samples: Any,
    *,
    inputs: str | None = None,
    targets: str | None = None,
    chunk: int | None = None,
    identity: str | None = None,
) -> Source:
    """Return a map-style dataset (`len(samples)`, `samples[i]`) as a source; torch's, `datasets`', grain's alike.

    Args:
        inputs, targets: of samples that are dicts, their keys; other samples are pairs.
        chunk: how many samples in a row are cheap to read together, such as those of a file; by default it is taken
            that all are equally near, and the shuffle is over all.
        identity: tells this dataset from others of the same length; its class by default.

    Raises:
        ConfigError: it is none, is empty, or its samples are no pairs.
    """
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ConfigError(
            f"dataset {type(samples).__name__}: must have a length and give samples[i]; iterable ones do not"
        )
    if len(samples) == 0:
        raise ConfigError(f"dataset {type(samples).__name__}: has no samples")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk {chunk}: must be at least 1 sample")
    return Mapped(samples, inputs, targets, chunk, identity)


class Mapped(Source):
    """A dataset that holds itself."""

    def __init__(
        self, samples: Any, inputs: str | None, targets: str | None, chunk: int | None, identity: str | None
    ) -> None:
        self.samples, self._keys = samples, (inputs, targets)
        self.name = type(samples).__name__
        self.shards = [self.name]
        count = len(samples)
        each = chunk or -(-count // _CHUNKS)
        self.sizes = np.full(-(-count // each), each, np.int64)
        self.sizes[-1] = count - each * (len(self.sizes) - 1)
        first = self.pair(samples[0])
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors_of(default_collate([first]))) or 1
        # Without chunks of its own nothing is held here: the whole fits into any memory.
        self.num_bytes = self.sizes * self.sample_bytes if chunk else np.ones(len(self.sizes), np.int64)
        self.lets_go = True
        self.each = each
        self.stored_bytes = count * self.sample_bytes
        self.identity = f"{count} samples of {identity or self.name}"

    def pair(self, sample: Any) -> tuple[Any, Any]:
        """Return a sample as (inputs, target)."""
        if isinstance(sample, dict):
            inputs, targets = self._keys
            if inputs is None or targets is None or inputs not in sample or targets not in sample:
                raise ConfigError(
                    f"dataset {self.name}: its samples have {', '.join(map(repr, sample))}; "
                    "name two of them with inputs= and targets="
                )
            return sample[inputs], sample[targets]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ConfigError(f"dataset {self.name}: a sample is a {type(sample).__name__}; must be (inputs, target)")
        return sample[0], sample[1]

    def load(self, chunk: int, busy: Busy) -> Chunk:
        return MappedChunk(self, chunk * self.each)


class MappedChunk(Chunk):
    """Samples in a row."""

    def __init__(self, source: Mapped, first: int) -> None:
        self._source, self._first = source, first

    def read(self, numbers: Numbers, wanted: Wanted) -> tuple[Tree, Tree]:
        pairs = [self._source.pair(self._source.samples[self._first + n]) for n in numbers.tolist()]
        inputs = default_collate([pair[0] for pair in pairs]) if wanted.inputs else None
        targets = default_collate([pair[1] for pair in pairs]) if wanted.targets else None
        return inputs, targets
