"""The figures of data, and of reading them, before training begins."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from .loader import Loader
from .residency import Residency
from .source import ALL, Busy, Source, Wanted

#: the disk is measured for about so long
_MEASURED_S = 1.0
#: samples that are read at once
_TOGETHER = 16
#: positions that are sampled for the distance of neighbours
_LOOKED_AT = 1024


class Survey(NamedTuple):
    """Figures of a source, read with a limit of memory."""

    shards: int
    samples: int
    #: as they are stored
    bytes: int
    chunks: int
    #: chunks that are in memory at a time
    window: int
    #: chunks that samples are mixed from at a time
    mixed: int
    #: how often a chunk is loaded in an epoch, on average
    loads_per_epoch: float
    #: chunks and batches, at most at once
    peak_mb: float
    #: samples that lie in storage between two that come one after the other, on average; a third of all for a full
    #: shuffle, and a third of a chunk where nothing but the inside of chunks is mixed
    mean_distance: float
    #: that chunks come from this disk, or over the network
    mb_per_s: float


def survey(loader: Loader) -> Survey:
    """Return the figures of the data that a loader would read."""
    source, order = loader.source, loader.order
    dry = Residency(_Dry(source), order, loader.room, loader.timeout_s, epochs=1)
    epoch = order.epoch(0)
    for block in range(epoch.num_blocks):
        dry.enter(0, block)
    dry.close()
    count = order.num_samples
    places = np.unique(np.linspace(0, max(0, count - 2), _LOOKED_AT, dtype=np.int64))
    apart = np.abs(order.at(np.minimum(places + 1, count - 1)) - order.at(places))
    return Survey(
        shards=len(source.shards),
        samples=count,
        bytes=source.stored_bytes,
        chunks=order.num_chunks,
        window=order.window,
        mixed=order.mixed,
        loads_per_epoch=dry.loads / order.num_chunks,
        peak_mb=(dry.peak_bytes + min(loader.ahead_bytes, count * source.sample_bytes)) / 1e6,
        mean_distance=float(apart.mean()),
        mb_per_s=_speed(source, epoch.chunks),
    )


def _speed(source: Source, chunks: np.typing.NDArray[np.int64]) -> float:
    """Load chunks and read samples of them for a while; return how many MB are loaded a second.

    Raises:
        DataError: a sample cannot be decoded.
    """
    begin, took, loaded = time.perf_counter(), 0.0, 0
    for chunk in chunks.tolist():
        since = time.perf_counter()
        held = source.load(chunk)
        took += time.perf_counter() - since
        loaded += int(source.num_bytes[chunk])
        for first in range(0, int(source.sizes[chunk]), _TOGETHER):
            source.rows(held, np.arange(first, min(first + _TOGETHER, int(source.sizes[chunk]))), ALL)
            if time.perf_counter() - begin > _MEASURED_S:
                return loaded / 1e6 / took
    return loaded / 1e6 / took


class _Dry(Source):
    """Chunks that take room, but are not read."""

    def __init__(self, source: Source) -> None:
        self.busy, self.sizes, self.num_bytes = Busy(), source.sizes, source.num_bytes

    def load(self, chunk: int, wanted: Wanted = ALL) -> None:
        return None
