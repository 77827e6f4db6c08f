"""Any map-style dataset, that of another library included: it keeps its own samples, and is only told which to give."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from ..dependency import ConfigError
from ..model.batches.lazy_batch import FieldSelection
from ..workers.transport.payload import Tree, tensors_of
from .bijection import Numbers
from .drawing import drawn, draws
from .source import ALL, Busy, Chunk, Source, Wanted, among

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
        inputs, targets: of samples that are dicts, a key, or several, whose values are given as a dict; other samples
            are pairs.
        chunk: how many samples in a row are cheap to read together, such as those of a file; by default it is taken
            that all are equally near, and the shuffle is over all.
        identity: tells this dataset from others of the same length; its class by default.

    Samples may draw from torch's, Python's and numpy's global generators, to crop or to flip: each draws numbers of its
    own in every epoch, the same on every worker and in a run that is resumed.

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

    #: make samples that draw nothing; None: the thread that reads does
    pool: ThreadPoolExecutor | None = None

    def __init__(
        self,
        samples: Any,
        inputs: Keys | None = None,
        targets: Keys | None = None,
        chunk: int | None = None,
        identity: str | None = None,
    ) -> None:
        self.samples, self._keys = samples, (inputs, targets)
        self.name = type(samples).__name__
        self.shards = [self.name]
        count = len(samples)
        each = chunk or -(-count // _CHUNKS)
        self.sizes = np.full(-(-count // each), each, np.int64)
        self.sizes[-1] = count - each * (len(self.sizes) - 1)
        (first,) = drawn(self.make, [0], 0)
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors_of(default_collate([first]))) or 1
        # Without chunks of its own nothing is held here: the whole fits into any memory.
        self.num_bytes = self.sizes * self.sample_bytes if chunk else np.ones(len(self.sizes), np.int64)
        self.lets_go = True
        self.each = each
        self.stored_bytes = count * self.sample_bytes
        self.identity = f"{count} samples of {identity or self.name}"

    def pair(self, sample: Any, wanted: Wanted = ALL) -> tuple[Any, Any]:
        """Return a sample as (inputs, target), as far as wanted."""
        if not isinstance(sample, dict):
            if not isinstance(sample, (tuple, list)) or len(sample) != 2:
                raise ConfigError(
                    f"dataset {self.name}: a sample is a {type(sample).__name__}; must be (inputs, target)"
                )
            return _part(sample[0], wanted.inputs), _part(sample[1], wanted.targets)
        keys = [[key] if isinstance(key, str) else list(key or ()) for key in self._keys]
        if not all(keys) or any(key not in sample for key in (*keys[0], *keys[1])):
            raise ConfigError(
                f"dataset {self.name}: its samples have {', '.join(map(repr, sample))}; "
                "name two of them with inputs= and targets="
            )
        said = self._keys
        return _of(sample, said[0], wanted.inputs), _of(sample, said[1], wanted.targets)

    def make(self, number: int, wanted: Wanted = ALL) -> tuple[Any, Any]:
        """Return a sample as (inputs, target), as far as wanted."""
        return self.pair(self.samples[number], wanted)

    @cached_property
    def draws(self) -> bool:
        return draws(lambda: self.make(0))

    @cached_property
    def uniform(self) -> bool:
        places = {0, len(self.samples) // 2, len(self.samples) - 1}
        forms = [_form(sample) for sample in drawn(self.make, sorted(places), 0)]
        return all(form == forms[0] for form in forms)

    def load(self, chunk: int, busy: Busy) -> Chunk:
        return MappedChunk(self, chunk * self.each)


class MappedChunk(Chunk):
    """Samples in a row."""

    def __init__(self, source: Mapped, first: int) -> None:
        self._source, self._first = source, first

    def read(self, numbers: Numbers, wanted: Wanted) -> tuple[Tree, Tree]:
        source = self._source
        places = (self._first + numbers).tolist()
        make = partial(source.make, wanted=wanted)
        if source.pool is None or self.keyed is not None:
            pairs = drawn(make, places, self.keyed)
        else:
            pairs = list(source.pool.map(make, places))
        inputs = default_collate([pair[0] for pair in pairs]) if wanted.inputs else None
        targets = default_collate([pair[1] for pair in pairs]) if wanted.targets else None
        return inputs, targets


def _of(sample: dict[str, Any], said: Keys | None, some: FieldSelection) -> Any:
    """Return what is wanted of the inputs or the targets of a sample that is a dict."""
    if isinstance(said, str):
        return sample[said] if some else None
    return {key: sample[key] for key in among(said or (), some)}


def _part(tree: Any, some: FieldSelection) -> Any:
    """Return what is wanted of the inputs or the targets of a sample."""
    return {key: tree[key] for key in among(tree, some)} if isinstance(some, frozenset) else tree


def _form(pair: Any) -> list[tuple[Any, ...]]:
    """Return types and shapes of a sample's tensors."""
    return [(tensor.dtype, *tensor.shape) for tensor in tensors_of(default_collate([pair]))]
