"""The time of slices of sequences: causal attention costs more at the end. Loads without torch."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from ..dependency import Action, Spec, W

#: the sizes of uneven slices are whole numbers of parts; a sequence has at least this many parts
_PARTS = 128


@dataclass(frozen=True)
class SliceCosts:
    """Which part of a microbatch's time does not simply grow with the length of a slice. Shares from 0 to 1."""

    #: share of a whole sequence's time that each slice takes, however short it is
    fixed: float = 0
    #: of a whole sequence's time: causal attention
    attention: float = 0

    def share(self, extent: tuple[float, float], *, attends: bool = True) -> float:
        """Return which part of a whole sequence's time its part from x to y takes.

        A token attends to all tokens before it, so that is y² - x² of attention's time and y - x of everything else's.

        Args:
            extent: x and y, from 0 to 1.
            attends: whether the action computes attention; `W` does not, as attention has no weights.
        """
        (x, y), attention = extent, self.attention if attends else 0
        return self.fixed + (y - x) * (1 - self.fixed - attention + attention * (x + y))

    def time_share(self, spec: Spec) -> Callable[[Action], float]:
        """Return which part of a whole sequence's time an action takes; 1 if sequences are not sliced."""
        if not (self.fixed or self.attention):
            return spec.share

        def share(action: Action) -> float:
            extent = spec.extent(action)
            return 1 if extent == (0, 1) else self.share(extent, attends=action.kind is not W)

        return share

    def balanced(self, count: int) -> tuple[int, ...]:
        """Return the sizes of `count` slices that take equally long, in parts of a sequence.

        >>> SliceCosts(attention=0.4).balanced(4)
        (43, 33, 28, 24)
        """
        linear, attention = 1 - self.fixed - self.attention, self.attention
        if not attention:
            return (1,) * count
        # The border behind a share of the work, from linear * x + attention * x² = share * (linear + attention). The
        # usual formula of the root would subtract two numbers that are nearly equal where there is little attention.
        works = (n / count * (linear + attention) for n in range(1, count + 1))
        borders = [0.0, *(2 * work / (linear + sqrt(linear**2 + 4 * attention * work)) for work in works)]
        parts = max(_PARTS, 32 * count)
        sizes = tuple(b - a for a, b in pairwise(round(parts * at) for at in borders))
        return (1,) * count if len(set(sizes)) == 1 else sizes
