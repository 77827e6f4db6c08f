"""When the workers of an elastic job take another shape: its launcher counts the workers that are missing."""

import os
import time
from collections.abc import Collection, Set

from .job import RESHAPE_AFTER, seconds

#: seconds that workers may be missing before the shape is chosen again
_AFTER_S = 60.0


class ShapeChanges:
    """The numbers of stages and replicas of a job, as far as its launcher knows them.

    Attributes:
        places: by number of live workers, how many of them the best shape has places for; empty: the shape stays.
        is_due: whether the shape is chosen again at the next rest.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes, self.places = num_processes, list[int]()
        self._missing: set[int] = set()
        self._due, self.is_due = 0.0, False
        #: whether newcomers get their state by a change, as the shape is not the first; and before the last change
        self._is_other = self._was_other = False
        #: by number of live workers, how many of them have got places
        self._took: dict[int, int] = {}
        self._after_s = seconds(os.environ, RESHAPE_AFTER, _AFTER_S)

    def _placed(self, gone: Collection[int]) -> int:
        """Return how many workers have places in the best shape without `gone`; 0: there is no other shape."""
        live = self._num_processes - len(gone)
        return self._took.get(live, self.places[live]) if self.places else 0

    def falls_due(self, gone: Collection[int]) -> bool:
        """Return whether workers have been missing for long, once."""
        if not self._missing:
            self._due = 0.0
        self._due = self._due or time.monotonic() + self._after_s
        if self.is_due or not self._missing or time.monotonic() < self._due or not self._placed(gone):
            return False
        self.is_due = True
        return True

    def useful(self, comes: set[int], gone: Set[int]) -> set[int]:
        """Return the newcomers that may take part: in another shape, only if it has places for more."""
        return comes if not self._is_other or self._placed(gone - comes) > self._num_processes - len(gone) else set()

    def chosen(self, comes: Set[int], gone: Collection[int]) -> tuple[int, list[str]]:
        """Return the number of workers that a new shape is chosen for, and why; 0: the shape stays.

        Args:
            comes: workers that are back.
            gone: workers that are missing then.
        """
        missing = sorted(self._missing - comes) if self.is_due else []
        why = [f"workers {missing} are missing for {self._after_s:g} s"] if missing else []
        return (self._placed(gone) if missing or (self._is_other and comes) else 0), why

    def begins(self, dies: Set[int], gone: Set[int], planned: bool, places: int) -> None:
        """Note that an epoch begins.

        Args:
            dies: workers that are missing from now on.
            gone: all workers that it is without.
            places: number of workers that a new shape is chosen for in it; 0: the shape stays.
        """
        self._missing = (self._missing | dies) & gone
        if places:
            self._missing, self._was_other, self._is_other = set(), self._is_other, True
        if planned:
            self._due, self.is_due = 0.0, False

    def changed(self, live: int, placed: int) -> None:
        """Record how many of the live workers the shape uses; 0: it has not changed, and never will."""
        self._took |= {live: placed} if placed else dict.fromkeys(range(self._num_processes + 1), 0)
        self._is_other = self._is_other if placed else self._was_other
