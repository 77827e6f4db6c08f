"""Windows by the sizes of unequal microbatches: as many in flight as have so many tokens together."""

from collections.abc import Sequence
from functools import lru_cache

from ..dependency import ConfigError


class Windows:
    """The windows of 1F1B in a step whose microbatches have sizes.

    The microbatches in flight on a stage follow each other. A forward waits until those up to its own microbatch have a
    sum of sizes of at most `most`.
    """

    def __init__(self, num_stages: int, sizes: Sequence[float], most: float) -> None:
        if max(sizes) > most:
            number = sizes.index(max(sizes))
            raise ConfigError(f"window_tokens {most}: must be at least {max(sizes):g}, which microbatch {number} has")
        #: for each microbatch, the last one that ends before its forward begins; -1: none must
        self.before: list[int] = []
        first = 0
        for m in range(len(sizes)):
            while sum(sizes[first : m + 1]) > most:
                first += 1
            self.before.append(first - 1)
        #: the most microbatches in flight
        self.widest = max(m - before for m, before in enumerate(self.before))
        #: slots of forwards (1) and backwards (-1), by way, stage and microbatch
        self.slots = {key: 2 * end + (key[0] == 1) for key, end in self._ends(num_stages).items()}

    def _ends(self, num_stages: int) -> dict[tuple[int, int, int], int]:
        """Return when all needs of an action can have ended and it, too, if forwards take 1 and backwards 2."""
        ends: dict[tuple[int, int, int], int] = {}
        for m, before in enumerate(self.before):
            for s in range(num_stages):
                ends[1, s, m] = 1 + max(ends.get(need, 0) for need in ((1, s - 1, m), (1, s, m - 1), (-1, s, before)))
            for s in reversed(range(num_stages)):
                ends[-1, s, m] = 2 + max(ends.get(need, 0) for need in ((1, s, m), (-1, s + 1, m), (-1, s, m - 1)))
        return ends


windows = lru_cache(maxsize=16)(Windows)
