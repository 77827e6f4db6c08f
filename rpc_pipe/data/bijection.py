"""A permutation of 0 … size-1 that is computed, not stored: a keyed Feistel network with cycle walking.

A Feistel network permutes pairs (left, right) with any round function (Luby & Rackoff 1988). Here the halves are
digits to the bases a and b with a b >= size and hardly more. A value outside is permuted again until it is inside:
walking along the cycle of a permutation gives a permutation (Black & Rogaway 2002, "Ciphers with arbitrary finite
domains").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
