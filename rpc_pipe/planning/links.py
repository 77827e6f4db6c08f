"""The links between workers: each by itself, or by level. Loads without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple


class Link(NamedTuple):
    """A link from one worker to another. It sends one payload at a time, in the order of their production."""

    #: time from the end of sending to arrival
    latency: float = 0
    #: bytes a unit of time
    bandwidth: float = float("inf")


class Levels(Mapping[tuple[int, int], Link]):
    """Links by level: between two workers of a node, of a rack, and so on; beyond the last there is none.

    Args:
        levels: (neighbouring workers of a group, their links), the smallest groups first.
        others: links that differ from their level's.
    """

    def __init__(
        self, num_workers: int, levels: Sequence[tuple[int, Link]], others: Mapping[tuple[int, int], Link]
    ) -> None:
        self._num_workers, self._levels, self._others = num_workers, levels, others

    def __getitem__(self, ends: tuple[int, int]) -> Link:
        if ends in self._others:
            return self._others[ends]
        source, target = ends
        for size, link in self._levels:
            if source // size == target // size and source != target:
                return link
        raise KeyError(ends)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        every = range(self._num_workers)
        return (ends for ends in product(every, every) if ends in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def kinds(self) -> set[Link]:
        """Return the links that differ."""
        return {link for _, link in self._levels} | {*self._others.values()}


def different(links: Mapping[tuple[int, int], Link]) -> set[Link]:
    """Return the links that differ."""
    return links.kinds() if isinstance(links, Levels) else {*links.values()}
