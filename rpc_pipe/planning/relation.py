"""A spec's whole relation as numbers, for evaluators that look at every action of every worker. Loads without torch.

The same edges as `dependency.entries`, by arithmetic instead of by asking: some 2 us an action instead of 10.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from ..dependency import (
    ACCUMULATING,
    ENDLESS,
    Action,
    B,
    F,
    G,
    I,
    Kind,
    R,
    ScheduleError,
    Spec,
    U,
    W,
    local_order,
    order_limit,
)


class Relation:
    """Every action has a number; those of a worker are consecutive, in the worker's order.

    Args:
        steps: how many steps follow each other; an F needs its worker's updates of the step before.

    Raises:
        ScheduleError: an edge names an action that nobody runs, or a slot is taken twice.
    """

    def __init__(self, spec: Spec, steps: int = 1) -> None:
        if spec.num_microbatches == ENDLESS:
            raise ScheduleError(f"{type(spec).__name__}: an endless stream cannot be looked at as a whole")
        self.spec = spec
        self.steps = steps
        orders = [list(local_order(spec, worker)) for worker in range(spec.num_workers)]
        self.actions: list[Action] = [a for order in orders for a in chain.from_iterable([order] * steps)]
        #: worker -> its first number; one more entry at the end
        self.first = [0]
        for order in orders:
            self.first.append(self.first[-1] + steps * len(order))
        self.worker: list[int] = [w for w, order in enumerate(orders) for _ in range(steps * len(order))]
        #: how many needs each action has
        self.num_needs = [0] * len(self.actions)
        #: number -> those on the same worker that need it
        self.own: list[list[int]] = [[] for _ in self.actions]
        #: number -> those on other workers that need it
        self.others: list[list[int]] = [[] for _ in self.actions]
        updates: list[list[int]] = [[] for _ in orders]
        for step in range(steps):
            starts = [self.first[w] + step * len(order) for w, order in enumerate(orders)]
            this = _Step(spec, orders, starts)
            for worker, (order, start) in enumerate(zip(orders, starts, strict=True)):
                self._connect(worker, start, this.needs(worker, order), updates[worker])
            updates = this.updates()

    def _connect(self, worker: int, start: int, all_needs: list[list[int]], updates: list[int]) -> None:
        """Enter the needs of one step of one worker, whose `updates` ended the step before."""
        own, others, num_needs, actions = self.own, self.others, self.num_needs, self.actions
        begin, end = self.first[worker], self.first[worker + 1]
        for number, needs in enumerate(all_needs, start):
            if updates and actions[number].kind is F:
                needs += updates
            num_needs[number] = len(needs)
            for need in needs:
                (own if begin <= need < end else others)[need].append(number)


class _Step:
    """The numbers of one step's actions, and what each needs."""

    def __init__(self, spec: Spec, orders: Sequence[list[Action]], starts: Sequence[int]) -> None:
        self._spec = spec
        self.orders = orders
        self.starts = starts
        shape = spec.num_stages, max(spec.num_microbatches, spec.num_routes)
        self._numbers: dict[Kind, list[list[int]]] = {kind: [[-1] * shape[1] for _ in range(shape[0])] for kind in Kind}
        for start, order in zip(starts, orders, strict=True):
            for number, (stage, kind, microbatch) in enumerate(order, start):
                self._numbers[kind][stage][microbatch] = number

    def updates(self) -> list[list[int]]:
        """Return the numbers of the updates, by worker."""
        return [
            [number for number, action in enumerate(order, start) if action.kind is U]
            for start, order in zip(self.starts, self.orders, strict=True)
        ]

    def needs(self, worker: int, order: Sequence[Action]) -> list[list[int]]:
        """Return the numbers of what each action of a worker needs."""
        spec, numbers = self._spec, self._numbers
        after = None if type(spec).after is Spec.after else spec.after
        forward, once_more, inputs, full = numbers[F], numbers[R], numbers[I], numbers[B]
        last_stage, limit = spec.last_stage, order_limit(spec, worker)
        single, synchronous = spec.num_routes == 1, spec.synchronous
        last_release: dict[tuple[int, int], int] = {}
        held: deque[int] = deque()
        num_forwards, all_needs = 0, []
        for number, action in enumerate(order, self.starts[worker]):
            stage, kind, m = action
            if kind is F:
                needs = [forward[stage - 1][m]] if stage else []
                if limit is not None:
                    num_forwards += 1
                    if num_forwards > limit:
                        needs.append(held.popleft())  # `check` has seen that there is one
            elif kind is B or kind is I:
                needs = [once_more[stage][m] if once_more[stage][m] >= 0 else forward[stage][m]]
                if stage < last_stage:
                    beyond = inputs[stage + 1][m]
                    needs.append(beyond if beyond >= 0 else full[stage + 1][m])
            elif kind is W:
                needs = [inputs[stage][m]]
            elif kind is R:
                needs = [forward[stage][m]]
            elif kind is U and not single:
                needs = [numbers[G][stage][route] for route in range(spec.num_routes)]
            elif synchronous:  # the last B or W of the shard: they are a chain
                release = last_release.get((-1, -1) if limit is not None else (stage, m))
                needs = [] if release is None else [release]
            else:
                needs = []
            if kind in ACCUMULATING:
                shard = (-1, -1) if limit is not None else (stage, 0 if single else spec.route(m))
                if shard in last_release:
                    needs.append(last_release[shard])
                last_release[shard] = number
                if limit is not None:
                    held.append(number)
            if after is not None and kind is not G and not (kind is U and synchronous):
                for need in after(action):
                    if need.microbatch >= 0:
                        needs.append(self._number(action, need))
            all_needs.append(needs)
        return all_needs

    def _number(self, action: Action, need: Action) -> int:
        try:
            number = self._numbers[need.kind][need.stage][need.microbatch]
        except IndexError:
            number = -1
        if number < 0 or need.stage < 0:
            raise ScheduleError(f"{action} needs {need}, which no worker runs")
        return number
