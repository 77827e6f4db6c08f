"""Needs of a step in earlier steps of an asynchronous stream, found at a step far from the stream's beginning."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .action import Action, Kind
from .declared import Declared
from .indexes import split_step
from .kinds import A, F
from .order import routes
from .reductions import Reductions, reduction_tree
from .spec import Spec
from .versions import updates_a_step

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
    longest = max(
        spec.slot(spec.actions(stage, last)[-1]) - spec.slot(spec.actions(stage, 0)[0])
        for stage in range(spec.num_stages)
    )
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
