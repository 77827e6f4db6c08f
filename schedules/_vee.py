"""What the V-shaped schedules share: placement, and listing a program phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ..dependency import Action, Kind, Order, Spec


class Vee(Spec):
    """Two stages on each worker: forward goes down the workers and comes back up, so the loss is where it began.

    In fixed order, which was faster in every V that was measured: ready starts something else when a payload is a
    moment late, and is then in the way.
    """

    @property
    def order(self) -> Order:
        return "fixed"

    @property
    def num_stages(self) -> int:
        return 2 * self.num_workers

    def place(self, stage: int, route: int) -> int:
        return min(stage, self.last_stage - stage)


class Listing:
    """Lists actions by kind and stage; the microbatch is the next of its kind there."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[Kind, int]] = Counter()

    def count(self, kind: Kind, stage: int) -> int:
        """Return how many of this kind and stage are listed."""
        return self._next[kind, stage]

    def add(self, *kinds_and_stages: tuple[Kind, int]) -> None:
        """List the next microbatch of each (kind, stage)."""
        for kind, stage in kinds_and_stages:
            self.actions.append(kind(stage, self._next[kind, stage]))
            self._next[kind, stage] += 1


def existing(actions: Iterable[Action], num_microbatches: int) -> Iterator[Action]:
    """Leave out microbatches beyond the last.

    A program made for more microbatches stays legal: data flow joins actions of one microbatch only.
    """
    return (action for action in actions if action.microbatch < num_microbatches)
