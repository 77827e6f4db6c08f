"""The cut of a chain whose costliest stage is as cheap as can be, by enumerating bottlenecks. Loads without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

#: boundaries of the stages: 0, the first block of stage 1, ..., the number of blocks
Ends = tuple[int, ...]
#: of (stage, first block, the block after its last)
StageCost = Callable[[int, int, int], float]
StageFits = Callable[[int, int, int], bool]


def least_bottleneck(
    num_blocks: int,
    num_stages: int,
    cost: StageCost,
    fits: StageFits = lambda stage, start, stop: True,
    *,
    may_be_empty: bool = False,
) -> Ends | None:
    """Return the boundaries of a cut whose costliest stage is cheap; None: none was found that fits.

    For a threshold, to give each stage as many blocks as it can take is as good as anything, and the threshold is
    lowered to what was reached until no cut is below. So with stages that may be empty the cut is the best there is,
    and a bound for all others. Where each must have a block it is the best if every stage could take every block.

    Args:
        cost: grows with the blocks.
        fits: whether a stage may have these blocks; fewer of them fit too.
    """

    def fill(most: float) -> Ends | None:
        ends = [0]
        for stage in range(num_stages):
            start = ends[-1]
            low, high = start, num_blocks
            if not may_be_empty:
                low, high = start + 1, num_blocks - (num_stages - stage - 1)  # a block each for the stages behind
            if cost(stage, start, low) > most or not fits(stage, start, low):
                return None
            while low < high:
                middle = (low + high + 1) // 2
                if cost(stage, start, middle) <= most and fits(stage, start, middle):
                    low = middle
                else:
                    high = middle - 1
            ends.append(low)
        return tuple(ends) if ends[-1] == num_blocks else None

    best = fill(float("inf"))
    if best is None:
        return None
    low, high = 0.0, costliest(best, cost)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        found = fill(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, costliest(found, cost))
    return best


def costliest(ends: Sequence[int], cost: StageCost) -> float:
    """Return what the costliest stage of a cut costs."""
    return max(cost(stage, a, b) for stage, (a, b) in enumerate(pairwise(ends)))
