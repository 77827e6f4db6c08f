"""Any spec under a virtual clock: what a schedule costs before anything runs.

Semantics: an action takes its cost; what it makes reaches another worker after the link's travel time (pulls are
asked ahead of need); all completions and arrivals at a time are seen before any worker chooses its next action
then; a started action is not interrupted. These are the decisions of `workers.state.WorkerState`, evaluated for all
workers at once; a property test holds the two equal. Loads without torch.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..dependency import ACCUMULATING, PER_REPLICA, Action, F, Kind, Order, PipeError, Spec
from .relation import Relation
from .span import Span

#: time of an action on its worker, in any unit
Cost = Callable[[Action], float]


class Link(NamedTuple):
    """The way from one worker to another. It carries one payload at a time, in the order in which they are made."""

    #: travel time
    latency: float = 0
    #: bytes a unit of time
    bandwidth: float = float("inf")


@dataclass(frozen=True)
class Simulation:
    """What a step, or several, cost. Times are in the unit of the costs."""

    spec: Spec
    order: Order
    #: every action that ran, by start time
    spans: tuple[Span, ...]
    #: (what, from, to, when it arrives) of what travelled, unless travel takes no time
    carried: tuple[tuple[Action, int, int, float], ...]
    #: time spent computing, by worker
    busy: tuple[float, ...]
    #: most microbatches of a stage kept from F to B (or W) at once, by worker
    peak_activations: tuple[int, ...]
    #: when the last action of each step ends
    step_ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end of what takes time."""
        return max((span.end for span in self.spans if span.end > span.start), default=0)

    @property
    def step_time(self) -> float:
        """Time of a step when steps follow each other: between the ends of the first and the last; one: makespan."""
        if len(self.step_ends) == 1:
            return self.makespan
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)

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
    spec: Spec,
    cost: Cost,
    *,
    comm: float = 0,
    order: Order | None = None,
    steps: int = 1,
    links: Mapping[tuple[int, int], Link] | None = None,
    payload: Callable[[Action], float] | None = None,
) -> Simulation:
    """Run `steps` steps of `spec` under a virtual clock.

    Args:
        comm: travel time between any two workers.
        links: those that are different, by (from, to).
        payload: bytes of what an action makes, for links of limited bandwidth.

    Raises:
        PipeError: the run cannot finish; `dependency.check_all` says why.
    """
    order = order or spec.order
    roads = _Roads(comm, links or {}, payload)
    with _no_collection():
        relation = Relation(spec, steps)
        run = _Run(relation, cost, order == "fixed", roads)
        run.complete()
        actions, worker = relation.actions, relation.worker
        spans = tuple([Span(worker[n], actions[n], start, end) for n, start, end in run.ran])
    step_ends = _step_ends(relation, run.ran)
    return Simulation(spec, order, spans, tuple(roads.carried), tuple(run.busy), tuple(run.peak), step_ends)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking at millions of small tuples, none of which is in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _step_ends(relation: Relation, ran: list[tuple[int, float, float]]) -> tuple[float, ...]:
    if relation.steps == 1:
        return (max((end for _, _, end in ran), default=0),)
    ends: list[float] = [0] * relation.steps
    lengths = [(b - a) // relation.steps for a, b in pairwise(relation.first)]
    for number, _, end in ran:
        worker = relation.worker[number]
        step = (number - relation.first[worker]) // lengths[worker]
        ends[step] = max(ends[step], end)
    return tuple(ends)


class _Roads:
    """When what is finished now arrives elsewhere."""

    def __init__(
        self, comm: float, links: Mapping[tuple[int, int], Link], payload: Callable[[Action], float] | None
    ) -> None:
        self._comm = comm
        self._links = links
        self._payload = payload or (lambda _: 0)
        self._free: dict[tuple[int, int], float] = {}
        #: (what, from, to, when it arrives), unless everything arrives at once
        self.carried: list[tuple[Action, int, int, float]] = []

    @property
    def at_once(self) -> bool:
        """Whether travel takes no time at all."""
        return not self._comm and not self._links

    def arrival(self, action: Action, source: int, target: int, now: float) -> float:
        """Return when `action`, finished at `now`, is at `target`."""
        link = self._links.get((source, target))
        there = now + self._comm
        if link is not None:
            sent = max(now, self._free.get((source, target), 0)) + self._payload(action) / link.bandwidth
            self._free[source, target] = sent
            there = sent + link.latency
        self.carried.append((action, source, target, there))
        return there


class _Run:
    """An event loop over numbers: most of the simulator's time is spent in `complete`."""

    def __init__(self, relation: Relation, cost: Cost, fixed: bool, roads: _Roads) -> None:
        num_workers = relation.spec.num_workers
        self._relation = relation
        self._roads = roads
        self._fixed = fixed
        self._costs = [cost(action) for action in relation.actions]
        #: (number, start, end) of what ran, by start
        self.ran: list[tuple[int, float, float]] = []
        self.busy: list[float] = [0] * num_workers
        self.peak = [0] * num_workers

    def complete(self) -> None:
        """Run until nothing can happen any more."""
        relation, costs, fixed = self._relation, self._costs, self._fixed
        missing, worker_of, own, others = relation.num_needs, relation.worker, relation.own, relation.others
        kinds = [action.kind for action in relation.actions]
        ready: list[list[int]] = [[] for _ in self.busy]  # by worker, heaps of numbers whose needs are met
        head = list(relation.first[:-1])  # by worker, what is next in fixed order
        idle = [True] * len(self.busy)
        live = [0] * len(self.busy)
        busy, peak, ran, at_once = self.busy, self.peak, self.ran, self._roads.at_once
        push, pop = heapq.heappush, heapq.heappop
        for number, count in enumerate(missing):
            if not count:
                ready[worker_of[number]].append(number)  # ascending, so a heap
        #: (time, number, numbers that it arrives for; None: it has been finished)
        events: list[tuple[float, int, list[int] | None]] = []
        touched = set(range(len(self.busy)))
        now: float = 0
        while True:
            for worker in touched:
                heap = ready[worker]
                if idle[worker] and heap and not (fixed and heap[0] != head[worker]):
                    number = pop(heap)
                    head[worker] += 1
                    idle[worker] = False
                    end = now + costs[number]
                    busy[worker] += costs[number]
                    ran.append((number, now, end))
                    if kinds[number] is F:
                        live[worker] += 1
                        if live[worker] > peak[worker]:
                            peak[worker] = live[worker]
                    push(events, (end, number, None))
            if not events:
                break
            now = events[0][0]
            touched = set()
            while events and events[0][0] == now:
                _, number, arrives_for = pop(events)
                if arrives_for is None:
                    worker = worker_of[number]
                    touched.add(worker)
                    idle[worker] = True
                    if kinds[number] in ACCUMULATING:
                        live[worker] -= 1
                    arrives_for = own[number]
                    if others[number]:
                        if at_once:
                            arrives_for = arrives_for + others[number]
                        else:
                            self._send(number, now, events)
                for need in arrives_for:
                    missing[need] -= 1
                    if not missing[need]:
                        worker = worker_of[need]
                        push(ready[worker], need)
                        touched.add(worker)
        if len(ran) != len(costs):
            self._say_deadlock()

    def _send(self, number: int, now: float, events: list[tuple[float, int, list[int] | None]]) -> None:
        """Put a finished action on its way to each worker that needs it."""
        relation = self._relation
        targets: dict[int, list[int]] = {}
        for need in relation.others[number]:
            targets.setdefault(relation.worker[need], []).append(need)
        for target, numbers in targets.items():
            there = self._roads.arrival(relation.actions[number], relation.worker[number], target, now)
            heapq.heappush(events, (there, number, numbers))

    def _say_deadlock(self) -> None:
        relation = self._relation
        done = {number for number, _, _ in self.ran}
        stuck = next(n for n in range(len(relation.actions)) if n not in done)
        waits = [n for n in range(len(relation.actions)) if n not in done and self._needs(n, stuck)]
        names = ", ".join(str(relation.actions[n]) for n in waits)
        worker = relation.worker[stuck]
        raise PipeError(f"deadlock: worker {worker}: cannot run {relation.actions[stuck]}, which waits for {names}")

    def _needs(self, number: int, by: int) -> bool:
        return by in self._relation.own[number] or by in self._relation.others[number]
