"""Times as whole numbers of a small unit: sums of these are exact, so equal times are seen to be equal."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import lcm

#: largest denominator of costs, and most ticks of a time
_FINEST, _MOST = 10**6, 2**53
#: more different costs than these are measured ones
_DIFFERENT = 1000


def ticks(values: Iterable[float]) -> tuple[int, dict[float, float]] | None:
    """Return how many ticks a unit of time has, and the ticks of each value; None if they have no common unit.

    The product of two decimal numbers is taken as a decimal number: 0.9099999999999999 is 0.91.
    """
    different = {*values}
    if len(different) > _DIFFERENT or not all(abs(value) < _MOST for value in different):
        return None
    exact = {value: Fraction(value).limit_denominator(_FINEST) for value in different}
    scale = lcm(*(each.denominator for each in exact.values()))
    if any(abs(float(each) - value) > abs(value) * 2**-50 for value, each in exact.items()):
        return None
    if max(exact.values(), default=Fraction(0)) * scale > _MOST >> 20:
        return None
    return scale, {value: int(each * scale) for value, each in exact.items()}
