"""Common parts of the V-shaped schedules: placement, and listing timetables phase by phase."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from ..dependency import Action, B, I, Kind, Order, Spec, W
from ..dependency.along import divide

#: a kind on a stage, for the next microbatch there; None: a slot without an action
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


class EqualSteps(NamedTuple):
    """Actions of a kind of a stage at equal distances: microbatches first, first + 1, ..., in slots `growth` apart."""

    first: int
    times: int
    slot: int
    growth: int


_first = attrgetter("first")


class Listed(Spec):
    """A schedule that lists the slots of a worker, from that worker's number alone."""

    def timetable(self, worker: int) -> "Listing":
        """Return the listed actions of `worker`; it may name microbatches that do not exist, which are left out.

        A timetable made for more microbatches stays legal: data flow joins actions of one microbatch only.
        """
        raise NotImplementedError

    def turn(self, microbatch: int) -> int:
        """Return the number of a microbatch in its direction; timetables count by it."""
        return microbatch

    def run(self, a: Action) -> EqualSteps | None:
        """Return the run that an action belongs to; None: it is not listed."""
        runs, turn = timetable(self, self.worker(a)).runs.get((a.kind, a.stage), ()), self.turn(a.index)
        found = divide(turn, runs, _first)
        return runs[found - 1] if found and turn < runs[found - 1].first + runs[found - 1].times else None

    def slot(self, a: Action) -> int:
        run = self.run(a)
        if run is None:
            raise KeyError(a)
        return run.slot + run.growth * (self.turn(a.index) - run.first)


@lru_cache(maxsize=1024)
def timetable(spec: Listed, worker: int) -> "Listing":
    """Return the timetable of `worker`. Cached: a check asks again for neighbours, a comparison for all workers."""
    return spec.timetable(worker)


class Listing:
    """Lists actions by kind and stage; the microbatch is the next there, for `W` the first with its `I` listed."""

    def __init__(self, begin: int = 0) -> None:
        #: the slot of the next action; a whole backward takes two
        self.end = begin
        #: by kind and stage, in order
        self.runs: defaultdict[tuple[Kind, int], list[EqualSteps]] = defaultdict(list)
        #: by stage, (first, count) of the microbatches of each `I` without a listed `W`
        self._split: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._next: Counter[tuple[int, int]] = Counter()

    def count(self, kind: Kind, stage: int) -> int:
        """Return how many forwards are listed, or backwards of either kind, as `kind` is."""
        return self._next[kind.way, stage]

    def waiting(self, stage: int) -> int:
        """Return how many `W` of a stage are to be listed."""
        return sum(count for _, count in self._split[stage])

    def add(self, *listables: Listable, times: int = 1) -> None:
        """List the next microbatch of each (kind, stage), `times` times."""
        if len(set(listables)) < len(listables) and times > 1:
            for _ in range(times):
                self.add(*listables)
            return
        length = sum(1 + (each is not None and each[0] is B) for each in listables)
        slot, weights = self.end, []
        for listable in listables if times > 0 else ():
            if listable is not None:
                kind, stage = listable
                if kind is W:
                    weights.append((stage, slot))
                else:
                    first = self._next[kind.way, stage]
                    self._next[kind.way, stage] += times
                    self.run(kind, stage, EqualSteps(first, times, slot, length))
                    if kind is I:
                        self._split[stage].append((first, times))
                slot += kind is B
            slot += 1
        for stage, at in weights:  # behind the `I`s listed above, which some of them follow
            left, queue = times, self._split[stage]
            while left:
                first, count = queue.popleft()
                if count > left:
                    queue.appendleft((first + left, count - left))
                    count = left
                self.run(W, stage, EqualSteps(first, count, at + (times - left) * length, length))
                left -= count
        self.end += max(0, times) * length

    def alternate(self, first: Sequence[Listable], second: Sequence[Listable], count: int) -> None:
        """List `count` in all of the two in turn."""
        self.add(*first, *second, times=count // 2)
        self.add(*first, times=count % 2)

    def run(self, kind: Kind, stage: int, run: EqualSteps) -> None:
        """Add a run; it may continue the run before it."""
        runs = self.runs[kind, stage]
        if runs:
            last = runs[-1]
            growth = run.slot - last.slot if last.times == 1 else last.growth
            goes_on = run.first == last.first + last.times and run.slot == last.slot + last.times * growth
            if goes_on and (run.times == 1 or run.growth == growth):
                runs[-1] = EqualSteps(last.first, last.times + run.times, last.slot, growth)
                return
        runs.append(run)
