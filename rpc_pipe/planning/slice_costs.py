"""The time of slices of a sequence: causal attention costs more at the end. Loads without torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from ..dependency import Action, Spec, W


def time_share(spec: Spec, attention: float = 0) -> Callable[[Action], float]:
    """Return which part of a whole sequence's time an action takes; 1 if sequences are not sliced.

    A token attends to all tokens before it, so a slice from x to y of a sequence takes y² - x² of attention's time and
    y - x of everything else's.

    Args:
        attention: attention's share of the time of a whole sequence, 0 to 1. `W` has none: attention has no weights.
    """
    if not attention or len(spec.slice_sizes) == 1:
        return spec.share
    borders = [at / sum(spec.slice_sizes) for at in accumulate(spec.slice_sizes, initial=0)]
    costs = [(y - x) * (1 - attention + attention * (x + y)) for x, y in pairwise(borders)]

    def share(action: Action) -> float:
        if not action.kind.per_microbatch or action.kind is W:
            return spec.share(action)
        return costs[action.index % len(costs)]

    return share
