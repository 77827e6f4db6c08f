"""The chunks in memory: the chunks of the current block, and the most of the next ones that fit.

The order of all later reads is known. To drop the chunk that is needed last loads the fewest chunks (Belady 1966).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class on Python 3.10
from itertools import islice
from typing import Any

import numpy as np

from ..dependency import ConfigError, Stalled
from ..system.sizes import format_bytes
from .bijection import Numbers
from .sample_order import Order
from .source import ALL, Source, Wanted

#: chunks that are loaded at once
_LOADERS = 2
_FEW = 64
#: share of the memory for chunks that is kept for the next chunks
_AHEAD = 8
#: of the user's limit, this share is for chunks and batches; the rest is left to the allocator and the interpreter
_USED = 0.8


def chunk_memory(memory: int, batch_bytes: int) -> int:
    """Return how many bytes of `memory` chunks may take, beside batches of this size that are made ahead."""
    return int(_USED * memory) - batch_bytes


def widest_window(num_bytes: Numbers, room: int, memory: int) -> int:
    """Return how many chunks may take part in a block, so that they and the next one always fit into `room` bytes.

    Raises:
        ConfigError: not even one and the next.
    """
    largest = np.sort(num_bytes)[::-1]
    if int(largest.sum()) <= room:
        return len(largest)
    spare = max(int(largest[0]), room // _AHEAD)
    window = int(np.searchsorted(np.cumsum(largest), room - spare, side="right"))
    if window < 1:
        both = 2 * int(largest[0])
        least = (both + max(memory * _USED - room, both / _AHEAD)) / _USED
        raise ConfigError(
            f"memory {format_bytes(memory)}: two chunks of up to {format_bytes(largest[0])} and batches must fit: "
            f"needs {format_bytes(1.01 * least)}, or smaller chunks"
        )
    return window


class Residency:
    """Holds chunks, loads and drops them. Used by one thread; other threads load chunks.

    Args:
        room: bytes that chunks may take.
        epochs: number of epochs to be read; None: no end.
        timeout_s: seconds that loading a chunk may take.
    """

    def __init__(self, source: Source, order: Order, room: int, timeout_s: float, epochs: int | None = None) -> None:
        self._source, self._order, self._room, self._timeout_s = source, order, room, timeout_s
        self._epochs = epochs
        #: the parts that are read of chunks loaded from now on
        self.wanted: Wanted = ALL
        self._pool = ThreadPoolExecutor(1 if source.in_order else _LOADERS, "chunks")
        self._held: dict[int, Future[Any]] = {}
        self._bytes, self._smallest = 0, max(1, int(source.num_bytes.min()))
        self._at: tuple[int, int] | None = None
        #: chunks that were loaded so far, and the most bytes ever held
        self.loads = 0
        self.peak_bytes = 0

    def enter(self, epoch: int, block: int, soon: Numbers | None = None) -> None:
        """Load the chunks of the block, and the most of the next chunks that fit.

        Args:
            soon: the chunks of the next samples, which come first.
        """
        if self._at == (epoch, block):
            return
        self._at = epoch, block
        window: list[int] = self._order.epoch(epoch).resident(block).tolist()
        needed = set(window)
        if soon is not None and not needed <= self._held.keys():
            window = list(dict.fromkeys([*soon.tolist(), *window]))
        for chunk in window:
            if chunk not in self._held:
                self._free(chunk, needed)
                self._load(chunk)
        most = min(len(self._source.num_bytes), max(1, self._room // self._smallest))
        for chunk in islice(self._next(epoch, block), most):
            needed.add(chunk)
            if chunk not in self._held:
                if not self._free(chunk, needed):
                    break
                self._load(chunk)

    def chunk(self, number: int) -> Any:
        """Wait for a chunk of the block.

        Raises:
            DataError: it cannot be loaded.
            Stalled: it takes too long.
        """
        loading = self._held[number]
        try:
            return loading.result(self._timeout_s)
        except (TimeoutError, FutureTimeoutError) as error:
            if loading.done():  # the storage itself raised a timeout
                raise
            shard = self._source.shard_of(number)
            raise Stalled(f"shard {shard}: has not been loaded for {self._timeout_s:g} s; raise timeout_s") from error

    def _next(self, epoch: int, block: int) -> Iterator[int]:
        """Yield the chunks that come after the block."""
        place = block + self._order.epoch(epoch).window
        while self._epochs is None or epoch < self._epochs:
            chunks = self._order.epoch(epoch).chunks
            for begin in range(place, len(chunks), _FEW):  # there may be very many, and few are needed
                yield from chunks[begin : begin + _FEW].tolist()
            epoch, place = epoch + 1, 0

    def _load(self, chunk: int) -> None:
        self.loads += 1
        self._bytes += int(self._source.num_bytes[chunk])
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._held[chunk] = self._pool.submit(self._source.load, chunk, self.wanted)

    def _free(self, wanted: int, needed: set[int]) -> bool:
        """Drop the chunks needed last until there is room for the chunk `wanted`; return whether there is room."""
        size = int(self._source.num_bytes[wanted])
        if self._bytes + size <= self._room:
            return True
        others = [chunk for chunk in self._held if chunk not in needed]
        for chunk in sorted(others, key=lambda chunk: -self._next_use(chunk)):
            self._drop(chunk)
            if self._bytes + size <= self._room:
                return True
        return False

    def _next_use(self, chunk: int) -> int:
        """Return how many chunks come before this one does, from the block that is read on."""
        assert self._at is not None
        epoch, block = self._at
        here, next_one = (int(self._order.epoch(number).places[chunk]) for number in (epoch, epoch + 1))
        return here if here >= block else self._order.num_chunks + next_one

    def _drop(self, chunk: int) -> None:
        self._held.pop(chunk).cancel()
        self._bytes -= int(self._source.num_bytes[chunk])

    def drop(self) -> None:
        """Release all chunks."""
        self._at = None
        for chunk in list(self._held):
            self._drop(chunk)

    def close(self) -> None:
        """Drop everything, and end the threads."""
        self.drop()
        self._pool.shutdown(wait=False, cancel_futures=True)
