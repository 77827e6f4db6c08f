"""Checks that cost too much to be made every time."""

from __future__ import annotations

#: after the powers of two below this, every multiple of it
_EVERY = 256


class OccasionalChecks:
    """Counts times: the first, second, fourth, eighth and so on are checked, later on every 256th."""

    def __init__(self) -> None:
        self._number, self._next = 0, 1

    def due(self) -> bool:
        """Tell whether this time, which comes next, is one to check."""
        self._number += 1
        if self._number < self._next:
            return False
        self._next = min(2 * self._next, self._next + _EVERY)
        return True
