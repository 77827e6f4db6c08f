"""Which times of many something is looked at that costs too much to be looked at every time."""

from __future__ import annotations

#: after the powers of two below this, every multiple of it
_EVERY = 256


class Looks:
    """Counts times: the first, second, fourth, eighth and so on are looked at, later on every 256th."""

    def __init__(self) -> None:
        self._number = 0

    def due(self) -> bool:
        """Tell whether this time, which comes next, is one to look at."""
        self._number = number = self._number + 1
        return not number % _EVERY or (number < _EVERY and not number & (number - 1))
