"""Any spec under a virtual clock: what a schedule costs before anything runs.

Semantics: an action takes its cost; what it makes reaches another worker after the link's travel time (pulls are
asked ahead of need); all completions and arrivals at a time are seen before any worker chooses its next action
then; a started action is not interrupted; actions of a worker on different resources overlap. These are the decisions
of `workers.state.WorkerState`, evaluated for all workers at once on the same compiled parts. Loads without torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from ..dependency import RESOURCES, Action, Kind, Order, Spec, U
from ..dependency.garbage import uncollected
from .relation import Relation
from .span import Span

#: time of an action on its worker, in any unit
Cost = Callable[[Action], float]

#: (number, start, end) of what ran, by start; (what, from, to, when it is known there)
_Ran = list[tuple[int, float, float]]
_Carried = list[tuple[Action, int, int, float]]


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
    #: time spent computing, by worker
    busy: tuple[float, ...]
    #: when the last action of each step ends
    step_ends: tuple[float, ...]
    #: time from the first start to the last end of what takes time
    makespan: float
    _relation: Relation = field(repr=False, compare=False)
    _ran: _Ran = field(repr=False)
    _comm: float = field(repr=False)
    _carried: _Carried | None = field(repr=False)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action that ran, by start time, but for what travelled between workers in no time."""
        worker, actions = self._relation.worker, self._relation.actions
        return tuple([
            Span(worker[n], actions[n], start, end)
            for n, start, end in self._ran
            if end > start or actions[n].kind.resource != "link"
        ])  # fmt: skip

    @cached_property
    def carried(self) -> tuple[tuple[Action, int, int, float], ...]:
        """(what, from, to, when it is known there) of what others waited for, unless travel takes no time."""
        if self._carried is not None:
            return tuple(carried for carried in self._carried if carried[0].kind.resource != "link")
        if not self._comm:
            return ()
        relation, ended = self._relation, sorted(self._ran, key=lambda ran: ran[2])
        return tuple(
            (relation.actions[n], relation.worker[n], target, end + self._comm)
            for n, _, end in ended
            if relation.actions[n].kind.resource != "link"
            for target, _ in relation.targets(n)
        )

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Most microbatches of a stage whose activations were on the device at once, by worker."""
        relation, num_workers = self._relation, self.spec.num_workers
        # Of what happens at one time, ends come first; what takes no time starts and ends when its turn comes.
        events: list[tuple[float, bool, int, int]] = []
        for turn, (number, start, end) in enumerate(self._ran):
            holds = relation.actions[number].kind.holds
            if holds:
                events.append((start, True, turn, number) if holds > 0 else (end, end == start, turn, number))
        live, peak = [0] * num_workers, [0] * num_workers
        for _, _, _, n in sorted(events):
            worker = relation.worker[n]
            live[worker] += relation.actions[n].kind.holds
            peak[worker] = max(peak[worker], live[worker])
        return tuple(peak)

    @property
    def step_time(self) -> float:
        """Time of a step when steps follow each other: between the ends of the first and the last; one: makespan."""
        if len(self.step_ends) == 1:
            return self.makespan
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)

    @cached_property
    def span(self) -> float:
        """Largest over workers of last end minus first start: a step's time when steps follow each other.

        A worker begins the next step when its part of this one has ended, though others are still at theirs.
        """
        worker, actions = self._relation.worker, self._relation.actions
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for number, start, end in self._ran:  # by start
            at = worker[number]
            if at not in first and (end > start or actions[number].kind.per_microbatch):
                first[at] = start
            if end > start and end > last.get(at, 0):  # an update that costs nothing may wait for a replica's gradients
                last[at] = end
        return max((last[at] - first[at] for at in last), default=0)

    @property
    def bubble(self) -> float:
        """Share of the workers' time that is not spent computing, 0 to 1."""
        return 1 - sum(self.busy) / (self.spec.num_workers * self.makespan) if self.makespan else 0.0

    @property
    def bubble_in_a_run(self) -> float:
        """The same when steps follow each other."""
        return 1 - sum(self.busy) / (self.spec.num_workers * self.span) if self.span else 0.0

    def orders(self) -> list[list[Action]]:
        """Return what each worker ran, in order, without the end of the step."""
        orders: list[list[Action]] = [[] for _ in range(self.spec.num_workers)]
        for span in self.spans:
            if span.action.kind.per_microbatch:
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
    """Run `steps` steps of `spec` under a virtual clock; arguments as of `price`.

    Raises:
        PipeError: the run cannot finish; `dependency.check_all` says why.
    """
    return price(Relation(spec, steps), cost, comm=comm, order=order, links=links, payload=payload)


def price(
    relation: Relation,
    cost: Cost,
    *,
    comm: float = 0,
    order: Order | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    payload: Callable[[Action], float] | None = None,
) -> Simulation:
    """Run a relation under a virtual clock.

    Args:
        comm: travel time between any two workers.
        order: `ready` or `fixed`; the schedule's own preference by default.
        links: those that are different, by (from, to).
        payload: bytes of what an action makes, for links of limited bandwidth; asked of those whose payloads are sent.

    Raises:
        PipeError: the run cannot finish; `dependency.check_all` says why.
    """
    with uncollected():
        costs = [cost(action) for action in relation.actions]
    return price_listed(relation, costs, comm=comm, order=order, links=links, payload=payload)


def price_listed(
    relation: Relation,
    costs: list[float],
    *,
    comm: float = 0,
    order: Order | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    payload: Callable[[Action], float] | None = None,
) -> Simulation:
    """Do as `price`, with the cost of every action of the relation in a list: for who prices the same one often."""
    order = order or relation.spec.order
    roads = _Roads(comm, links, payload) if links else None
    with uncollected():
        if order == "fixed" and roads is None:
            ran = _in_fixed_order(relation, costs, comm)
        else:
            ran = _as_ready(relation, costs, order == "fixed", comm, roads)
    busy: list[float] = [0] * relation.spec.num_workers
    compute = RESOURCES.index("compute")
    for (number, _, _), lane in zip(ran, [relation.lane[number] for number, _, _ in ran], strict=True):
        if lane % len(RESOURCES) == compute:
            busy[relation.worker[number]] += costs[number]
    makespan = max([end for _, start, end in ran if end > start], default=0)
    carried = None if roads is None else roads.carried
    ends = _step_ends(relation, ran)
    return Simulation(relation.spec, order, tuple(busy), ends, makespan, relation, ran, comm, carried)


def _step_ends(relation: Relation, ran: _Ran) -> tuple[float, ...]:
    if relation.spec.num_steps > 1:
        return _ends_in_stream(relation, ran)
    if relation.steps == 1:
        return (max([end for _, _, end in ran], default=0),)
    ends: list[float] = [0] * relation.steps
    lengths = [(b - a) // relation.steps for a, b in pairwise(relation.first)]
    for number, _, end in ran:
        worker = relation.worker[number]
        step = (number - relation.first[worker]) // lengths[worker]
        ends[step] = max(ends[step], end)
    return tuple(ends)


def _ends_in_stream(relation: Relation, ran: _Ran) -> tuple[float, ...]:
    """Return when each step of a stream ends, in which steps overlap."""
    spec = relation.spec
    ends: list[float] = [0] * spec.num_steps
    updates = Counter(action.stage for action in relation.actions if action.kind is U)
    for number, _, end in ran:
        stage, kind, index = relation.actions[number]
        if kind.per_microbatch or kind is U:
            step = index // (spec.num_microbatches if kind.per_microbatch else updates[stage] // spec.num_steps)
            ends[step] = max(ends[step], end)
    return tuple(ends)


class _Roads:
    """When what is finished now arrives elsewhere, where links differ or carry one payload after the other."""

    def __init__(
        self, comm: float, links: Mapping[tuple[int, int], Link], payload: Callable[[Action], float] | None
    ) -> None:
        self._comm = comm
        self._links = links
        self._payload = payload or (lambda _: 0)
        self._free: dict[tuple[int, int], float] = {}
        self.carried: _Carried = []

    def arrival(self, action: Action, source: int, target: int, now: float, *, carries: bool) -> float:
        """Return when `action`, finished at `now`, is at `target`; `carries`: with what it has made."""
        link = self._links.get((source, target))
        there = now + self._comm
        if link is not None:
            size = self._payload(action) if carries and action.kind.resource != "link" else 0
            sent = max(now, self._free.get((source, target), 0)) + size / link.bandwidth
            self._free[source, target] = sent
            there = sent + link.latency
        self.carried.append((action, source, target, there))
        return there


def _in_fixed_order(relation: Relation, costs: list[float], comm: float) -> _Ran:
    """Run where each lane's order is given: an action starts when its lane is free and the last of its needs is met."""
    earliest: list[float] = [0] * len(costs)
    free: list[float] = [0] * relation.num_lanes
    lanes, own, others = relation.lane, relation.own, relation.others
    ran: _Ran = []
    for number in relation.in_sequence:
        lane = lanes[number]
        start = earliest[number]
        if free[lane] > start:
            start = free[lane]
        end = free[lane] = start + costs[number]
        ran.append((number, start, end))
        for user in own[number]:
            if earliest[user] < end:
                earliest[user] = end
        if others[number]:
            there = end + comm
            for user in others[number]:
                if earliest[user] < there:
                    earliest[user] = there
    ran.sort(key=itemgetter(1))
    return ran


def _as_ready(relation: Relation, costs: list[float], fixed: bool, comm: float, roads: _Roads | None) -> _Ran:
    """Run event by event: most of a planner's time is spent here."""
    missing, lanes, own, others = relation.num_needs.copy(), relation.lane, relation.own, relation.others
    ready: list[list[int]] = [[] for _ in range(relation.num_lanes)]  # heaps of numbers whose needs are met
    queues: list[list[int]] = [[] for _ in range(relation.num_lanes)]
    for number, lane in enumerate(lanes):
        queues[lane].append(number)
        if not missing[number]:
            ready[lane].append(number)  # ascending, so a heap
    issued = [0] * relation.num_lanes
    idle = [True] * relation.num_lanes
    at_once = roads is None and not comm
    push, pop = heapq.heappush, heapq.heappop
    #: (time, number, numbers that it arrives for; None: it has been finished)
    events: list[tuple[float, int, list[int] | None]] = []
    touched = set(range(relation.num_lanes))
    ran: _Ran = []
    now: float = 0
    while True:
        for lane in touched:
            heap = ready[lane]
            if heap and idle[lane] and not (fixed and heap[0] != queues[lane][issued[lane]]):
                number = pop(heap)
                issued[lane] += 1
                idle[lane] = False
                end = now + costs[number]
                ran.append((number, now, end))
                push(events, (end, number, None))
        if not events:
            break
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, number, arrives_for = pop(events)
            if arrives_for is None:
                touched.add(lanes[number])
                idle[lanes[number]] = True
                arrives_for = own[number]
                if others[number]:
                    if at_once:
                        arrives_for = arrives_for + others[number]
                    elif roads is None:
                        push(events, (now + comm, number, others[number]))
                    else:
                        action, source = relation.actions[number], relation.worker[number]
                        for target, numbers in relation.targets(number):
                            carries = (number, target) not in relation.marks
                            there = roads.arrival(action, source, target, now, carries=carries)
                            push(events, (there, number, numbers))
            for user in arrives_for:
                missing[user] -= 1
                if not missing[user]:
                    lane = lanes[user]
                    push(ready[lane], user)
                    touched.add(lane)
    if len(ran) != len(costs):
        relation.say_deadlock({number for number, _, _ in ran})
    return ran
