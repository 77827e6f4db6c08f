"""The workers' own state machine under a virtual clock: what a schedule costs before anything runs.

Semantics: an action takes its cost; what it makes reaches another worker `comm` later (pure latency, pulls
are asked ahead of need); all completions and arrivals at a time are seen before any worker chooses its next
action then; a started action is not interrupted. Loads without torch.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .dependency import ACCUMULATING, ENDLESS, PER_REPLICA, Action, F, Kind, Order, PipeError, Spec, entries
from .timeline import Span
from .workers.state import Instruction, Pull, WorkerState

#: time of an action on its worker, in any unit
Cost = Callable[[Action], float]

#: enough for whole steps: the simulator is not limited by how many pulls a worker keeps in flight
_WHOLE_STEP = ENDLESS


@dataclass(frozen=True)
class Simulation:
    """What a step costs. Times are in the unit of the costs."""

    spec: Spec
    order: Order
    #: every action that ran, by start time
    spans: tuple[Span, ...]
    #: time spent computing, by worker
    busy: tuple[float, ...]
    #: most microbatches of a stage kept from F to B (or W) at once, by worker
    peak_activations: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end of what takes time."""
        return max((span.end for span in self.spans if span.end > span.start), default=0)

    @property
    def span(self) -> float:
        """Largest over workers of last end minus first start: a step's time when steps follow each other."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for s in self.spans:
            if s.end > s.start:  # an update that costs nothing may wait for a replica's gradients
                first.setdefault(s.worker, s.start)
                last[s.worker] = max(s.end, last.get(s.worker, s.end))
        return max((last[worker] - first[worker] for worker in first), default=0)

    @property
    def bubble(self) -> float:
        """Share of the workers' time that is not spent computing, 0 to 1."""
        return 1 - sum(self.busy) / (self.spec.num_workers * self.makespan) if self.makespan else 0.0

    def orders(self) -> list[list[Action]]:
        """Return what each worker ran, in order, without the updates."""
        orders: list[list[Action]] = [[] for _ in range(self.spec.num_workers)]
        for span in self.spans:
            if span.action.kind not in PER_REPLICA:
                orders[span.worker].append(span.action)
        return orders


def uniform(costs: Mapping[Kind, float]) -> Cost:
    """Return a cost that depends on the kind only; kinds not named cost nothing."""
    return lambda action: costs.get(action.kind, 0)


def simulate(
    spec: Spec, cost: Cost, *, comm: float = 0, order: Order | None = None, lookahead: int = _WHOLE_STEP
) -> Simulation:
    """Run one step of `spec` under a virtual clock.

    Raises:
        PipeError: the run cannot finish; `dependency.check_all` says why.
    """
    order = order or spec.order
    states = [WorkerState(entries(spec, w), order, lookahead) for w in range(spec.num_workers)]
    clock = _Clock(comm)
    spans: list[Span] = []
    live = [0] * spec.num_workers
    peak = [0] * spec.num_workers
    busy: list[float] = [0] * spec.num_workers

    for worker, state in enumerate(states):
        clock.carry(worker, state.start())
    touched = set(range(spec.num_workers))
    while touched:
        for worker in sorted(touched):
            action = states[worker].take()
            if action is None:
                continue
            duration = cost(action)
            spans.append(Span(worker, action, clock.now, clock.now + duration))
            busy[worker] += duration
            if action.kind is F:
                live[worker] += 1
                peak[worker] = max(peak[worker], live[worker])
            clock.finish_after(duration, worker, action)
        touched = set()
        for worker, action, is_arrival in clock.advance():
            touched.add(worker)
            if is_arrival:
                clock.carry(worker, states[worker].arrived(action))
            else:
                live[worker] -= action.kind in ACCUMULATING
                clock.announce(action)
                clock.carry(worker, states[worker].finished(action))
    for worker, state in enumerate(states):
        if not state.complete:
            blocked = state.blocked()
            why = "its own actions wait for each other"
            if blocked is not None:
                names = ", ".join(str(need.action) for need in blocked[1])
                why = f"cannot run {blocked[0]}, which waits for {names}"
            raise PipeError(f"deadlock: worker {worker}: {why}")
    return Simulation(spec, order, tuple(spans), tuple(busy), tuple(peak))


class _Clock:
    """Virtual time, and what is on its way to whom."""

    def __init__(self, comm: float) -> None:
        self.now: float = 0
        self._comm = comm
        self._events: list[tuple[float, int, int, Action, bool]] = []
        self._number = 0
        self._finished: dict[Action, float] = {}
        self._asked: defaultdict[Action, list[int]] = defaultdict(list)

    def _push(self, time: float, worker: int, action: Action, is_arrival: bool) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, worker, action, is_arrival))

    def finish_after(self, duration: float, worker: int, action: Action) -> None:
        self._push(self.now + duration, worker, action, False)

    def carry(self, worker: int, instructions: list[Instruction]) -> None:
        """Send the pulls of `worker` on their way; what is already finished arrives `comm` after its end."""
        for instruction in instructions:
            if not isinstance(instruction, Pull):
                continue
            finished = self._finished.get(instruction.action)
            if finished is None:
                self._asked[instruction.action].append(worker)
            else:
                self._push(max(self.now, finished + self._comm), worker, instruction.action, True)

    def announce(self, action: Action) -> None:
        """Answer those who asked for `action`, which has just finished."""
        self._finished[action] = self.now
        for worker in self._asked.pop(action, ()):
            self._push(self.now + self._comm, worker, action, True)

    def advance(self) -> Iterator[tuple[int, Action, bool]]:
        """Go to the next time at which something happens and yield all of it, with what it causes then."""
        if self._events:
            self.now = self._events[0][0]
        while self._events and self._events[0][0] == self.now:
            _, _, worker, action, is_arrival = heapq.heappop(self._events)
            yield worker, action, is_arrival
