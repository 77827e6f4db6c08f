"""The workers' own state machines, one by one, under a virtual clock: what the simulator must agree with."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from rpc_pipe.dependency import (
    NO_REDUCTIONS,
    RESOURCES,
    Action,
    Milestone,
    Order,
    Part,
    PipeError,
    Pulled,
    Reductions,
    Spec,
    entries,
    reduction_tree,
)
from rpc_pipe.planning.simulator import Cost
from rpc_pipe.planning.span import Span
from rpc_pipe.workers.state import WorkerState


def run_state_machines(
    spec: Spec, cost: Cost, *, comm: float = 0, order: Order | None = None, reductions: Reductions = NO_REDUCTIONS
) -> tuple[list[Span], list[int]]:
    """Run one step of `spec`; return what ran, and the peaks of activations.

    Raises:
        PipeError: the run cannot finish; `dependency.check_all` says why.
    """
    parts = [Part(spec, worker, entries(spec, worker, reductions=reductions)) for worker in range(spec.num_workers)]
    states = [WorkerState(part, order or spec.order) for part in parts]
    clock = _Clock(comm)
    spans: list[Span] = []
    live = [0] * spec.num_workers
    peak = [0] * spec.num_workers

    for worker, state in enumerate(states):
        clock.ask(worker, state.part.pulls)
    touched = set(range(spec.num_workers))
    while touched:
        for worker in sorted(touched):
            for resource in RESOURCES:
                entry = states[worker].take(resource)
                if entry is None:
                    continue
                duration = cost(entry.action)
                spans.append(Span(worker, entry.action, clock.now, clock.now + duration))
                if entry.action.kind.holds > 0:
                    live[worker] += 1
                    peak[worker] = max(peak[worker], live[worker])
                clock.finish_after(duration, worker, entry.action)
                for milestone in states[worker].part.milestones.get(entry.action, ()):
                    share = reduction_tree(spec, reductions).share(milestone)
                    if share < 1:
                        clock.reach_after(share * duration, worker, milestone)
        touched = set()
        for worker, action, is_arrival in clock.advance():
            touched.add(worker)
            if isinstance(action, Milestone):
                states[worker].reached(action)
            elif is_arrival:
                states[worker].arrived(action)
            else:
                live[worker] -= action.kind.holds < 0
                clock.announce(action)
                states[worker].finished(action)
    for worker, state in enumerate(states):
        if state.left:
            blocked = state.blocked()
            why = "its own actions wait for each other"
            if blocked is not None:
                names = ", ".join(str(need.action) for need in blocked[1])
                why = f"cannot run {blocked[0]}, which waits for {names}"
            raise PipeError(f"deadlock: worker {worker}: {why}")
    return spans, peak


class _Clock:
    """Virtual time, and what is on its way to whom."""

    def __init__(self, comm: float) -> None:
        self.now: float = 0
        self._comm = comm
        self._events: list[tuple[float, int, int, Action | Milestone, bool]] = []
        self._number = 0
        self._asked: defaultdict[Action, list[int]] = defaultdict(list)

    def _push(self, time: float, worker: int, action: Action | Milestone, is_arrival: bool) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, worker, action, is_arrival))

    def finish_after(self, duration: float, worker: int, action: Action) -> None:
        self._push(self.now + duration, worker, action, False)

    def reach_after(self, duration: float, worker: int, milestone: Milestone) -> None:
        self._push(self.now + duration, worker, milestone, False)

    def ask(self, worker: int, pulls: list[Pulled]) -> None:
        for pull in pulls:
            self._asked[pull.action].append(worker)

    def announce(self, action: Action) -> None:
        """Answer those who asked for `action`, which has just finished."""
        for worker in self._asked.pop(action, ()):
            self._push(self.now + self._comm, worker, action, True)

    def advance(self) -> Iterator[tuple[int, Action | Milestone, bool]]:
        """Go to the next time at which something happens and yield all of it, with what it causes then."""
        if self._events:
            self.now = self._events[0][0]
        while self._events and self._events[0][0] == self.now:
            _, _, worker, action, is_arrival = heapq.heappop(self._events)
            yield worker, action, is_arrival
