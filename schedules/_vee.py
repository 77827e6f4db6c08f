"""Common parts of the V-shaped schedules: placement, and listing programs phase by phase."""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from ..dependency import Action, I, Kind, Order, Spec, W


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


class Listed(Spec):
    """A schedule that lists the orders of all workers together."""

    def orders_of_workers(self) -> list[list[Action]]:
        """Return the order of each worker."""
        raise NotImplementedError

    @cached_property
    def _orders(self) -> list[list[Action]]:
        return self.orders_of_workers()

    def program(self, worker: int) -> list[Action]:
        return self._orders[worker]


class Listing:
    """Lists actions by kind and stage; the microbatch is the next there, of `W` the first whose `W` is not listed."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        #: each `I` without a listed `W`
        self.split: list[Action] = []
        self._next: Counter[tuple[int, int]] = Counter()

    def count(self, kind: Kind, stage: int) -> int:
        """Return how many are listed that go as `kind` does: forwards, or backwards of either kind."""
        return self._next[kind.way, stage]

    def waiting(self, *stages: int) -> list[tuple[Kind, int]]:
        """Return the `W` to be listed, the first of `stages` first."""
        return [(W, stage) for stage in stages for action in self.split if action.stage == stage]

    def add(self, *kinds_and_stages: tuple[Kind, int]) -> None:
        """List the next microbatch of each (kind, stage)."""
        for kind, stage in kinds_and_stages:
            if kind is W:
                before = next(action for action in self.split if action.stage == stage)
                self.split.remove(before)
                self.actions.append(before._replace(kind=W))
                continue
            self.actions.append(kind(stage, self._next[kind.way, stage]))
            self._next[kind.way, stage] += 1
            if kind is I:
                self.split.append(self.actions[-1])


def existing(actions: Iterable[Action], num_microbatches: int) -> list[Action]:
    """Leave out microbatches beyond the last.

    A program made for more microbatches stays legal: data flow joins actions of one microbatch only.
    """
    return [action for action in actions if action.microbatch < num_microbatches]
