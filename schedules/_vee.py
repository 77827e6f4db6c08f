"""Common parts of the V-shaped schedules: placement, and listing timetables phase by phase."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ..dependency import Action, B, I, Kind, Order, Spec, W

#: a kind on a stage, whose microbatch is the next there; None: a slot without an action
Listable = tuple[Kind, int] | None


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
    """A schedule that lists the slots of a worker, from that worker's number alone."""

    def timetable(self, worker: int) -> Sequence[Action | None]:
        """Return the action in each slot of `worker`; it may name microbatches that do not exist, which are left out.

        A timetable made for more microbatches stays legal: data flow joins actions of one microbatch only.
        """
        raise NotImplementedError

    def slot(self, a: Action) -> int:
        return slots(self, self.worker(a))[a]


@lru_cache(maxsize=8)
def slots(spec: Listed, worker: int) -> Mapping[Action, int]:
    """Return the slot of each action of `worker`; a check asks for those of a worker and its neighbours."""
    listed = enumerate(spec.timetable(worker))
    return {action: slot for slot, action in listed if action and action.index < spec.num_microbatches}


class Listing:
    """Lists actions by kind and stage; the microbatch is the next there, of `W` the first of `split`."""

    def __init__(self, begin: int = 0) -> None:
        #: the action that begins in each slot; a whole backward takes two
        self.slots: list[Action | None] = [None] * begin
        #: by stage, the slot and microbatch of each `I` without a listed `W`
        self.split: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._next: Counter[tuple[int, int]] = Counter()

    def count(self, kind: Kind, stage: int) -> int:
        """Return how many are listed that go as `kind` does: forwards, or backwards of either kind."""
        return self._next[kind.way, stage]

    def waiting(self, *stages: int) -> list[Listable]:
        """Return the `W` to be listed, the first of `stages` first."""
        return [(W, stage) for stage in stages for _ in self.split[stage]]

    def longest_waiting(self) -> list[Listable]:
        """Return the `W` to be listed, in the order of their `I`."""
        waiting = sorted((slot, stage) for stage, queue in self.split.items() for slot, _ in queue)
        return [(W, stage) for _, stage in waiting]

    def add(self, *listables: Listable) -> None:
        """List the next microbatch of each (kind, stage)."""
        for listable in listables:
            if listable is None:
                self.slots.append(None)
                continue
            kind, stage = listable
            if kind is W:
                _, microbatch = self.split[stage].popleft()
            else:
                microbatch = self._next[kind.way, stage]
                self._next[kind.way, stage] += 1
            if kind is I:
                self.split[stage].append((len(self.slots), microbatch))
            self.slots.append(kind(stage, microbatch))
            if kind is B:
                self.slots.append(None)
