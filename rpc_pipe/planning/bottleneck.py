"""The cut of a chain that minimises the cost of the costliest stage, by bisection. Loads without torch."""

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
    """Return the boundaries of a cut with a cheap costliest stage; None: no cut that fits was found.

    For a given threshold it is optimal to give each stage in turn as many blocks as stay below it; bisection finds the
    least threshold. So if stages may be empty, the cut is optimal and a lower bound of all others; if each must have a
    block, it is optimal provided that every stage can take every single block.

    Args:
        cost: of (stage, first block, block behind the last); must grow with the blocks.
        fits: whether a stage may have these blocks; if so, it may have fewer of them too.
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
    """Return the cost of the costliest stage of a cut."""
    return max(cost(stage, a, b) for stage, (a, b) in enumerate(pairwise(ends)))
