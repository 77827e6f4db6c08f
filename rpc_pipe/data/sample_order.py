"""The sample at a position is a function of the seed and one integer, while chunks take turns in memory.

    chunks in the order of an epoch   c0 c1 c2 c3 c4 ...
    block 0                           [c0 c1 c2]            W = 3 chunks are resident
    block 1                              [c1 c2 c3]         one has gone, one has come
    block 2                                 [c2 c3 c4]

Block t mixes the chunks t … t+W-1. The samples of a chunk are dealt in equal shares, at random, to the blocks of the
chunk, and the samples of a block are permuted. So a chunk is loaded once an epoch and stays for W blocks, memory
changes by one chunk at a time, and every block has samples of W chunks.

Chunks are not only permuted: chunks that are resident together are from different parts of the data. So data that are
sorted, by label or by time, are mixed better than by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dependency import ConfigError

Numbers = NDArray[np.int64]
Keys = NDArray[np.uint64]

_ROUNDS = 6


def key(*parts: int) -> int:
    """Return 64 bits that depend on all of `parts`."""
    mixed: Keys = np.asarray(0x243F6A8885A308D3, np.uint64)
    for part in parts:
        mixed = _mix(mixed ^ np.uint64(int(part) & 0xFFFFFFFFFFFFFFFF))
    return int(mixed)


def keys(base: int, numbers: Numbers) -> Keys:
    """Return for each of `numbers` the 64 bits that `key(base, number)` is."""
    first = np.uint64(key(base))
    return _mix(first ^ numbers.astype(np.uint64))


def permute(indexes: Numbers, size: int | Numbers, keyed: int | Keys) -> Numbers:
    """Return the images of `indexes` under a permutation of 0 … size-1, which the key selects.

    Args:
        size: of all, or of each.
        keyed: one permutation for all, or one for each.
    """
    indexes = np.asarray(indexes, np.int64)
    sizes = np.asarray(size, np.uint64)
    secrets = np.asarray(keyed, np.uint64)
    a, b = _bases(sizes)
    found = _network(indexes.astype(np.uint64), a, b, secrets)
    outside = np.flatnonzero(found >= sizes)
    if len(outside):
        sizes, a, b, secrets = (np.broadcast_to(each, indexes.shape) for each in (sizes, a, b, secrets))
    while len(outside):
        walked = _network(found[outside], a[outside], b[outside], secrets[outside])
        found[outside] = walked
        outside = outside[walked >= sizes[outside]]
    return found.astype(np.int64)


def _bases(sizes: Keys) -> tuple[Keys, Keys]:
    a = np.maximum(np.ceil(np.sqrt(sizes.astype(np.float64))), 1).astype(np.uint64)
    return a, (sizes + a - np.uint64(1)) // a


def _network(numbers: Keys, a: Keys, b: Keys, secrets: Keys) -> Keys:
    left = numbers // b
    right = numbers - left * b
    for number in range(0, _ROUNDS, 2):
        left = _added(left, _mix(right ^ secrets ^ _ROUND_KEYS[number]), a)
        right = _added(right, _mix(left ^ secrets ^ _ROUND_KEYS[number + 1]), b)
    return left * b + right


def _added(digit: Keys, scattered: Keys, base: Keys) -> Keys:
    """Add a number below `base`, made of the upper bits without a division, to a digit of that base."""
    half = np.uint64(32)
    added = digit + (((scattered >> half) * base) >> half)
    return added - (added >= base) * base


def _mix(x: Keys) -> Keys:
    """Scatter bits (the finaliser of SplitMix64: Steele, Lea & Flood 2014)."""
    with np.errstate(over="ignore"):  # numpy warns of single numbers, not of arrays
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        scattered: Keys = x ^ (x >> np.uint64(31))
    return scattered


_ROUND_KEYS = [np.uint64(0xD1B54A32D192ED03 * (number + 1) & 0xFFFFFFFFFFFFFFFF) for number in range(_ROUNDS)]


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
        shuffle: otherwise samples keep the order of the source.

    Raises:
        ConfigError: there are no samples, or the window is below 1.
    """

    def __init__(
        self, sizes: Sequence[int] | Numbers, seed: int, window: int | None = None, shuffle: bool = True
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
        #: how many chunks a block mixes
        self.mixed = self.window if shuffle else 1
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
        found = [self._starts[each.chunks] + each.numbers for each in self.locate(np.arange(begin, end))]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


class Epoch:
    """The order of one epoch."""

    def __init__(self, order: Order, number: int) -> None:
        self._order = order
        self._key = key(order.seed, number)
        #: key of its samples' random numbers
        self.drawn = key(self._key, _DRAWN)
        #: the chunks in the order of the epoch
        self.chunks = self._spread() if order.shuffle else np.arange(order.num_chunks)
        # Without shuffling each chunk is a block.
        self.window = order.mixed
        self.num_blocks = order.num_chunks - self.window + 1
        self._sizes = order.sizes[self.chunks]
        self._ends = np.concatenate(([0], np.cumsum(self._sizes)))
        self._last: ShuffleBlock | None = None

    def _spread(self) -> Numbers:
        """Permute the chunks so that every W in a row come one from each of W parts.

        The parts take turns. Within a part chunks are spread as evenly as they can be: neighbours in the order are in
        different halves, each of four in a row is in another quarter, and so on (a van der Corput sequence, scrambled
        as by Owen 1995).
        """
        count, parts = self._order.num_chunks, self._order.window
        borders = np.arange(parts + 1) * count // parts
        part = np.repeat(np.arange(parts), np.diff(borders))
        inside, sizes = np.arange(count) - borders[part], np.diff(borders)[part]
        levels = int(sizes.max() - 1).bit_length()
        base = key(self._key, _CHUNKS)
        place, turned = (inside << levels) // sizes, np.zeros(count, np.int64)
        for level in range(levels):
            node = (part << levels) + (place >> (levels - level))
            swapped = (keys(key(base, level), node) & np.uint64(1)).astype(np.int64)
            turned |= ((place >> (levels - 1 - level) & 1) ^ swapped) << level
        by_part = np.lexsort((turned, part))
        turn = np.empty(count, np.int64)
        turn[by_part] = inside  # chunks of a part lie in a row
        return np.lexsort((keys(key(self._key, _TURNS), part), turn))

    @cached_property
    def places(self) -> Numbers:
        """Where each chunk stands in the order of the epoch."""
        return np.argsort(self.chunks)

    def resident(self, block: int) -> Numbers:
        """Return the chunks that `block` is made of."""
        return self.chunks[block : block + self.window]

    def _behind(self, places: Numbers, block: int) -> Numbers:
        """Return how many samples of the resident chunks at `places` are in blocks before `block`."""
        first = np.maximum(0, places - self.window + 1)
        last = np.minimum(places, self.num_blocks - 1)
        behind: Numbers = (block - first) * self._sizes[places] // (last - first + 1)
        return behind

    def _dealt(self, block: int) -> tuple[Numbers, Numbers]:
        """Return how many samples of the block's chunks are in blocks before it, and up to it."""
        places = np.arange(block, block + self.window)
        return self._behind(places, block), self._behind(places, block + 1)

    def begin(self, block: int) -> int:
        """Return the position in the epoch where a block begins."""
        if block == self.num_blocks:
            return self._order.num_samples
        return int(self._ends[block] + self._dealt(block)[0].sum())

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
        begin = int(self._ends[low] + before.sum())
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
