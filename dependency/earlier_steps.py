"""Asynchronous streams far from their beginning: needs in earlier steps, the age of gradients, versions of weights."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from .action import A, Action, F, Kind, split_step
from .declared import Declared
from .order import routes
from .reductions import Reductions, on_route, reduction_tree
from .spec import Spec
from .versions import updates_a_step, updates_before

#: number of a step so far from the beginning of a stream that the beginning has no effect on it
STEADY = 1 << 20


def steady(spec: Declared, action: Action) -> Action:
    """Return `action` of a step as an action of a stream, far from its beginning."""
    per_step = spec.num_microbatches if action.kind.per_microbatch else updates_a_step(spec)
    return action._replace(index=action.index + STEADY * per_step)


def period(spec: Declared) -> int:
    """Return the growth of slots from step to step."""
    first = next(iter(spec.actions(0, 0)))
    return spec.slot(first._replace(index=spec.num_microbatches)) - spec.slot(first)


def most_open(spec: Declared) -> int:
    """Return the most steps of a stream in progress at once, including one that is prefetched."""
    if spec.synchronous:
        return 2
    last = spec.num_microbatches - 1
    ends = ((spec.actions(stage, 0)[0], spec.actions(stage, last)[-1]) for stage in range(spec.num_stages))
    longest = max(spec.slot(end) - spec.slot(begin) for begin, end in ends)
    return longest // period(spec) + 2


class EarlierSteps:
    """The needs of a stream's step in earlier steps: versions and windows, and the end of the step before.

    Args:
        order: of the worker.
        chained: as for `entries`.
    """

    def __init__(self, spec: Spec, reductions: Reductions, order: Sequence[Action], chained: Collection[int]) -> None:
        self._spec, self._tree, self._route = spec, reduction_tree(spec, reductions), routes(spec)
        self._last = {self._place(a): a for a in order if a.kind.way == 1 and a.stage in chained}

    def _place(self, action: Action) -> tuple[int, int, Kind]:
        return action.stage, self._route(action.index), action.kind

    def of(self, action: Action) -> tuple[tuple[int, Action], ...]:
        """Return (steps earlier, action of the worker counted within that step)."""
        spec = self._spec
        if not spec.orders(action):
            return ()
        needs = []
        for need in spec.needs(steady(spec, action)):
            per_step = spec.num_microbatches if need.kind.per_microbatch else updates_a_step(spec)
            step, index = split_step(need.index, per_step)
            if step < STEADY:
                needs.append((STEADY - step, need._replace(index=index)))
        if not action.kind.per_microbatch:
            needs += [(1, each) for each in self._tree.earlier(action)]
        elif (last := self._last.pop(self._place(action), None)) is not None:
            needs.append((1, last))
        if spec.parallelism.zero and action.kind is F:
            needs += [(steps, A(need.stage, need.index)) for steps, need in needs if not need.kind.per_microbatch]
        return tuple(needs)


def staleness(spec: Declared, stage: int) -> int:
    """Return the most updates of a stage between the weights of a gradient and the gradient's update."""
    if spec.synchronous:
        return 0
    first = STEADY * spec.num_microbatches
    own = range(first, first + spec.num_microbatches)
    return max(updates_before(spec, m) - spec.version(stage, m) for m in own)


def weight_copies(spec: Declared, stage: int) -> int:
    """Return how many versions of a stage's weights, of each route, are held at once at most, at any timing.

    A version is held while a microbatch before its backward uses it, or while it is the newest. Backwards of a route
    add up in order, so before the backward of a microbatch only updates that need no later one can have been made.
    """
    if spec.synchronous:
        return 1
    most, begin = 1, STEADY * spec.num_microbatches
    end = begin + spec.num_microbatches + (max(staleness(spec, stage), 0) + 2) * spec.round_size
    for route in range(spec.num_routes):
        uses = [*on_route(spec, range(begin, end), route)]
        versions = [spec.version(stage, m) for m in uses]
        different = [0, *accumulate(a != b for a, b in pairwise(versions))]
        for at, m in enumerate(uses):
            if m >= begin + spec.num_microbatches:
                break
            newest = updates_before(spec, m)
            last = bisect_right(versions, newest) - 1
            used = different[last] - different[at] + 1 if last >= at else 0
            most = max(most, used + (last < at or versions[last] != newest))
    return most


def held_copies(spec: Declared, stage: int, route: int) -> int:
    """Return the copies of a stage's weights on a route, with an elastic average's reference."""
    return weight_copies(spec, stage) + (route == 0 and spec.averaging_pull > 0)


def lateness(spec: Declared) -> tuple[list[int], list[int]]:
    """Return, by worker, the largest staleness in updates, and the copies of weights in shares of 1/P of the model."""
    hosted = [spec.hosted(worker) for worker in range(spec.num_workers)]
    copies = [sum(held_copies(spec, *each) for each in own) for own in hosted]
    late = [max((staleness(spec, stage) for stage, _ in own), default=0) for own in hosted]
    return late, [-(-held * spec.num_workers // spec.num_stages) for held in copies]
