"""Which sample stands at a position: a function of the seed and one integer, while chunks take turns in memory.

    chunks in the order of an epoch   c0 c1 c2 c3 c4 ...
    block 0                           [c0 c1 c2]            W = 3 chunks are resident
    block 1                              [c1 c2 c3]         one has gone, one has come
    block 2                                 [c2 c3 c4]

Block t mixes the chunks t … t+W-1. The samples of a chunk are dealt in equal shares, at random, to the blocks that the
chunk is in, and those of a block are permuted. So a chunk comes once an epoch and stays for W blocks, memory changes by
one chunk at a time, and every block has samples of W chunks.

Where chunks let go of samples that are behind, they stay for 2 W - 1 blocks: on average half of a chunk is left, so all
of them are W chunks' worth of samples, and every block mixes 2 W - 1 chunks. An epoch begins with W whole ones, which
deal less and less as others come; its last W blocks deal what is left in equal shares.

Chunks are not only permuted but spread: those that are resident together lie in different parts of the data, so that
data that are sorted, by label or by time, are mixed better than by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..dependency import ConfigError
from .bijection import Numbers, key, keys, permute

_CHUNKS, _TURNS, _SAMPLES, _BLOCKS, _DRAWN = range(1, 6)


class Segment(NamedTuple):
    """Samples at positions in a row that lie in one block."""

    epoch: int
    block: int
    #: of each sample, its chunk and its number there
    chunks: Numbers
    numbers: Numbers


@dataclass(frozen=True)
class ShuffleBlock:
    """Positions of an epoch that share their resident chunks."""

    number: int
    begin: int
    end: int
    #: the chunks, how many of each one's samples earlier blocks had, and where each one's begin in the block
    chunks: Numbers
    before: Numbers
    starts: Numbers


class Order:
    """The order of all epochs.

    Args:
        sizes: samples of each chunk.
        window: how many chunks are resident at once, at most all; None: all, which is a full shuffle.
        shuffle: otherwise samples come as they are stored.
        lets_go: whether chunks can let go of samples that are behind; then `window` counts chunks' worth of samples.
    """

    def __init__(
        self,
        sizes: Sequence[int] | Numbers,
        seed: int,
        window: int | None = None,
        shuffle: bool = True,
        lets_go: bool = False,
    ) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        self.num_samples = int(self.sizes.sum())
        if self.num_samples == 0:
            raise ConfigError("data: there are no samples")
        self.num_chunks = len(self.sizes)
        self.window = self.num_chunks if window is None else min(window, self.num_chunks)
        if self.window < 1:
            raise ConfigError(f"window {window}: must be at least 1 chunk")
        self.seed, self.shuffle = seed, shuffle
        # If half of all are resident, it is better that some stay for the next epoch.
        self.lets_go = lets_go and shuffle and 2 * self.window <= self.num_chunks
        #: how many chunks a block mixes
        self.mixed = 2 * self.window - 1 if self.lets_go else self.window if shuffle else 1
        self._starts = np.concatenate(([0], np.cumsum(self.sizes)))
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        """Return epoch `number`; the last two that were asked for are kept. Several threads may ask."""
        found = self._epochs.get(number)
        if found is None:
            found = Epoch(self, number)
            self._epochs = {**dict([*self._epochs.items()][-1:]), number: found}
        return found

    def locate(self, positions: Numbers) -> Iterator[Segment]:
        """Yield the samples at positions that ascend, which may lie in several blocks and epochs.

        Thousands at once cost hardly more than ten.
        """
        at = 0
        while at < len(positions):
            number, inside = divmod(int(positions[at]), self.num_samples)
            epoch, before = self.epoch(number), number * self.num_samples
            block = epoch.block_at(inside)
            stop = int(np.searchsorted(positions, before + block.end))
            yield Segment(number, block.number, *epoch.within(block, positions[at:stop] - before))
            at = stop

    def samples(self, begin: int, end: int) -> Numbers:
        """Return the samples at positions `begin` … `end`-1, numbered as they are stored."""
        return self.at(np.arange(begin, end))

    def at(self, positions: Numbers) -> Numbers:
        """Return the samples at positions that ascend, numbered as they are stored."""
        found = [self._starts[each.chunks] + each.numbers for each in self.locate(positions)]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


class Epoch:
    """The order of one epoch."""

    def __init__(self, order: Order, number: int) -> None:
        self._order = order
        self._key = key(order.seed, number)
        #: what random numbers of its samples are keyed by
        self.drawn = key(self._key, _DRAWN)
        #: the chunks in the order in which they come
        self.chunks = self._spread() if order.shuffle else np.arange(order.num_chunks)
        # Without shuffling chunk after chunk is a block of its own.
        self.window = order.window if order.shuffle else 1
        #: from this block on no chunk comes: those that let go deal what is left of them in W equal shares
        self._coda = order.num_chunks - self.window
        self.num_blocks = order.num_chunks if order.lets_go else self._coda + 1
        self._sizes = order.sizes[self.chunks]
        self._ends = np.concatenate(([0], np.cumsum(self._sizes)))
        self._last: ShuffleBlock | None = None

    def _spread(self) -> Numbers:
        """Permute the chunks so that every W in a row, or 2 W if chunks let go, come one from each of so many parts.

        The parts take turns. Within a part chunks come as evenly as they can: neighbours in the order lie in different
        halves, of four in a row each lies in another quarter, and so on (a van der Corput sequence, scrambled as by
        Owen 1995).
        """
        count = self._order.num_chunks
        parts = 2 * self._order.window if self._order.lets_go else self._order.window
        borders = np.arange(parts + 1) * count // parts
        part = np.repeat(np.arange(parts), np.diff(borders))
        inside, sizes = np.arange(count) - borders[part], np.diff(borders)[part]
        levels = int(sizes.max() - 1).bit_length()
        base = key(self._key, _CHUNKS)
        place, spread = (inside << levels) // sizes, np.zeros(count, np.int64)
        for level in range(levels):
            node = (part << levels) + (place >> (levels - level))
            swapped = (keys(key(base, level), node) & np.uint64(1)).astype(np.int64)
            spread |= ((place >> (levels - 1 - level) & 1) ^ swapped) << level
        by_part = np.lexsort((spread, part))
        turn = np.empty(count, np.int64)
        turn[by_part] = inside  # chunks of a part lie in a row
        return np.lexsort((keys(key(self._key, _TURNS), part), turn))

    def resident(self, block: int) -> Numbers:
        """Return the chunks that `block` is made of."""
        return self.chunks[self._oldest(block) : block + self.window]

    def left(self, block: int) -> Numbers:
        """Return how many samples of its chunks come in `block` or behind it."""
        return self._sizes[self._oldest(block) : block + self.window] - self._dealt(block)[0]

    def shares(self, chunk: int, block: int) -> Iterator[tuple[int, Numbers]]:
        """Yield the blocks from `block` on that a chunk is in, each with its samples, which ascend."""
        place = np.flatnonzero(self.chunks == chunk)
        size, block = int(self._sizes[place[0]]), max(block, int(place[0]) - self.window + 1)
        begin = first = int(self._behind(place, block)[0])
        numbers = permute(np.arange(first, size), size, key(key(self._key, _SAMPLES), chunk))
        while begin < size:
            end = int(self._behind(place, block + 1)[0])
            yield block, np.sort(numbers[begin - first : end - first])
            begin, block = end, block + 1

    def _oldest(self, block: int) -> int:
        """Return the place of the first chunk that `block` is made of."""
        if not self._order.lets_go:
            return block
        block = min(block, self._coda)
        return 0 if block < self._order.mixed else block - self.window + 1

    def _behind(self, places: Numbers, block: int) -> Numbers:
        """Return how many samples of the chunks at `places`, which have come and not gone, come before `block`."""
        sizes, first = self._sizes[places], np.maximum(0, places - self.window + 1)
        if not self._order.lets_go:
            behind: Numbers = (block - first) * sizes // (np.minimum(places, self._coda) - first + 1)
            return behind
        stay = self._order.mixed
        came = min(block, self._coda) - first
        # The first ones leave to others what these take, so that every block has a chunk's worth of samples.
        is_first = places < self.window
        share = np.where(is_first, came * (2 * stay + 1 - came), came)
        before_coda = share * sizes // np.where(is_first, stay * (stay + 1), stay)
        behind = before_coda + (sizes - before_coda) * max(0, block - self._coda) // self.window
        return behind

    def _dealt(self, block: int) -> tuple[Numbers, Numbers]:
        """Return how many samples of its chunks came in blocks before `block`, and have come with it."""
        places = np.arange(self._oldest(block), min(block + self.window, len(self.chunks)))
        return self._behind(places, block), self._behind(places, block + 1)

    def begin(self, block: int) -> int:
        """Return the position in the epoch at which a block begins."""
        if block == self.num_blocks:
            return self._order.num_samples
        return int(self._ends[self._oldest(block)] + self._dealt(block)[0].sum())

    def block_at(self, position: int) -> ShuffleBlock:
        """Return the block with a position of the epoch."""
        last = self._last
        if last is not None and last.begin <= position < last.end:
            return last
        low, high = 0, self.num_blocks
        if last is not None and position >= last.end:  # mostly it is the next one
            low = last.number + 1
            high = low + 1 if self.begin(low + 1) > position else high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.begin(middle) <= position else (low, middle)
        # Blocks of tiny chunks may be empty: the last one that begins here has the position.
        before, after = self._dealt(low)
        starts = np.concatenate(([0], np.cumsum(after - before)))
        begin = int(self._ends[self._oldest(low)] + before.sum())
        found = self._last = ShuffleBlock(low, begin, begin + int(starts[-1]), self.resident(low), before, starts)
        return found

    def within(self, block: ShuffleBlock, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return chunks and numbers of the samples at positions of the epoch that lie in `block`."""
        inside = positions - block.begin
        if self._order.shuffle:
            inside = permute(inside, block.end - block.begin, key(self._key, _BLOCKS, block.number))
        place = np.searchsorted(block.starts, inside, side="right") - 1
        chunks = block.chunks[place]
        numbers = inside - block.starts[place] + block.before[place]
        if self._order.shuffle:
            numbers = permute(numbers, self._order.sizes[chunks], keys(key(self._key, _SAMPLES), chunks))
        return chunks, numbers
