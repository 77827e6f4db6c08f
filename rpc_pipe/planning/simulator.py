"""A discrete-event simulation of any schedule: the cost of a step before anything runs.

An action takes its cost; its output reaches another worker after the link's transfer time (workers ask for it ahead of
need); a worker sees all completions and arrivals of a moment before it chooses its next action; a started action is
not interrupted; actions of a worker on different resources overlap. These are the decisions of
`workers.state.WorkerState`, made for all workers at once on the same compiled parts. Loads without torch.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import ClassVar, NamedTuple

from ..dependency import RESOURCES, Action, Kind, Order, ScheduleError, Spec
from ..system.garbage import uncollected
from .relation import Relation
from .span import Span, most_held, ticks


class Link(NamedTuple):
    """A link from one worker to another. It sends one payload at a time, in the order of their production."""

    #: time from the end of sending to arrival
    latency: float = 0
    #: bytes a unit of time
    bandwidth: float = float("inf")


class Levels(Mapping[tuple[int, int], Link]):
    """Links by level: between two workers of a node, of a rack, and so on; beyond the last there is none.

    Args:
        levels: (neighbouring workers of a group, their links), the smallest groups first.
        others: links that differ from their level's.
    """

    def __init__(
        self, num_workers: int, levels: Sequence[tuple[int, Link]], others: Mapping[tuple[int, int], Link]
    ) -> None:
        self._num_workers, self._levels, self._others = num_workers, levels, others

    def __getitem__(self, ends: tuple[int, int]) -> Link:
        if ends in self._others:
            return self._others[ends]
        source, target = ends
        for size, link in self._levels:
            if source // size == target // size and source != target:
                return link
        raise KeyError(ends)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        every = range(self._num_workers)
        return (ends for ends in product(every, every) if ends in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def kinds(self) -> set[Link]:
        """Return the links that differ."""
        return {link for _, link in self._levels} | {*self._others.values()}


def different(links: Mapping[tuple[int, int], Link]) -> set[Link]:
    """Return the links that differ."""
    return links.kinds() if isinstance(links, Levels) else {*links.values()}


#: duration of an action on its worker, in any unit
Cost = Callable[[Action], float]

#: (number, start, end) of the actions that ran, by start; (action, source, target, arrival) of transfers
_Ran = list[tuple[int, float, float]]
_Transfers = list[tuple[Action, int, int, float]]


@dataclass(frozen=True)
class Outcome:
    """The figures of a simulated run of one step or several. Times are in the unit of the costs."""

    spec: Spec
    order: Order
    #: time spent computing, by worker
    busy: tuple[float, ...]
    #: when the last action of each step ends
    step_ends: tuple[float, ...]
    #: when the last action that takes time ends
    makespan: float
    #: the time of a step in a sequence of steps: the largest over workers of last end minus first start. A worker
    #: begins the next step when its part of this one has ended, even if its peers have not finished theirs
    span: float

    @property
    def step_time(self) -> float:
        """Mean time between the ends of steps; of a single step the makespan."""
        if len(self.step_ends) == 1:
            return self.makespan
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)

    @property
    def bubble(self) -> float:
        """Idle share of the workers' time in the makespan, 0 to 1."""
        return 1 - sum(self.busy) / (self.spec.num_workers * self.makespan) if self.makespan else 0.0

    @property
    def steady_bubble(self) -> float:
        """The same share of `span`."""
        return 1 - sum(self.busy) / (self.spec.num_workers * self.span) if self.span else 0.0


@dataclass(frozen=True)
class Simulation(Outcome):
    """A simulated run with all its actions."""

    relation: Relation = field(repr=False, compare=False)
    _ran: _Ran = field(repr=False)
    _comm: float = field(repr=False)
    _transfers: _Transfers | None = field(repr=False)
    #: time that was not simulated: none
    repeated: ClassVar[float] = 0
    #: ticks in a unit of time
    _scale: int = field(repr=False, default=1)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action that ran, by start, except transfers that took no time."""
        worker, actions = self.relation.worker, self.relation.actions
        return tuple([
            Span(worker[n], actions[n], *in_time((start, end), self._scale))
            for n, start, end in self._ran
            if end > start or actions[n].kind.resource != "control"
        ])  # fmt: skip

    @property
    def ways(self) -> frozenset[tuple[int, int]]:
        """(source, target) of workers that send to each other."""
        return frozenset((source, target) for _, source, target, _ in self.transfers)

    @property
    def num_actions(self) -> int:
        """The number of actions of microbatches."""
        return sum(span.action.kind.per_microbatch for span in self.spans)

    @cached_property
    def transfers(self) -> tuple[tuple[Action, int, int, float], ...]:
        """(action, source, target, arrival) of every transfer; empty if transfers take no time."""
        relation, found = self.relation, self._transfers
        if found is None:
            found = [
                (relation.actions[n], relation.worker[n], target, end + self._comm)
                for n, _, end in self._ran
                for target, _ in (relation.targets(n) if self._comm else ())
            ]
        found = [transfer for transfer in found if transfer[0].kind.resource != "control"]
        if self._scale > 1:
            found = [(*way, arrival / self._scale) for *way, arrival in found]  # type: ignore[misc]
        return tuple(found)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most microbatches of a stage with activations on the device at once, by worker.

        They are whole numbers, unless sequences are sliced: a slice counts as its share of a microbatch.
        """
        return tuple(most_held(self.spans, self.spec.num_workers, self.spec))

    @cached_property
    def messages(self) -> int:
        """The number of payloads between workers."""
        relation = self.relation
        return sum(
            (number, target) not in relation.signals
            for number, action in enumerate(relation.actions) if action.kind.resource != "control"
            for target, _ in relation.targets(number)
        )  # fmt: skip

    def orders(self) -> list[list[Action]]:
        """Return the order of each worker's actions of microbatches."""
        orders: list[list[Action]] = [[] for _ in range(self.spec.num_workers)]
        for span in self.spans:
            if span.action.kind.per_microbatch:
                orders[span.worker].append(span.action)
        return orders


def uniform(costs: Mapping[Kind, float]) -> Cost:
    """Return a cost function of the kind alone; kinds that are not named cost nothing."""
    return lambda action: costs.get(action.kind, 0)


def simulate(
    what: Spec | Relation,
    cost: Cost | Sequence[float],
    *,
    comm: float = 0,
    order: Order | None = None,
    steps: int = 1,
    links: Mapping[tuple[int, int], Link] | None = None,
    payload: Callable[[Action], float] | None = None,
    uplinks: Mapping[int, float] | None = None,
) -> Simulation:
    """Simulate `steps` steps of a spec, or a relation that was compiled before.

    Args:
        cost: of an action; or the costs by number of action, for one relation and many costs.
        comm: transfer time between any two workers.
        order: `ready` or `fixed`; by default the schedule's preference.
        links: links that differ from that, by (source, target).
        payload: bytes of an action's output, for links and uplinks of limited bandwidth.
        uplinks: bytes a unit of time that a worker sends to all peers together, by worker.

    Raises:
        ScheduleError: the run cannot finish; `dependency.check_all` finds the cause.
    """
    relation = Relation(what, steps) if isinstance(what, Spec) else what
    order = order or relation.spec.order
    links, queued = links or {}, bool(links or uplinks)
    costs = [cost(action) for action in relation.actions] if callable(cost) else cost
    kinds = different(links)
    timeless = not uplinks and all(link.bandwidth == float("inf") for link in kinds)
    known = ticks([*{*costs}, comm, *(link.latency for link in kinds)]) if timeless else None
    scale, exact = known or (1, {})
    if exact:
        costs, comm = [exact[each] for each in costs], exact[comm]
        links = {pair: Link(exact[link.latency]) for pair, link in links.items()}
    link_queues = _LinkQueues(comm, links, payload, uplinks or {}) if queued else None
    with uncollected():
        ran = _run(relation, costs, order == "fixed", comm, link_queues)
    if len(ran) != len(costs):
        raise ScheduleError(f"deadlock: {len(costs) - len(ran)} actions cannot run; `dependency.check_all` says why")
    transfers = None if link_queues is None else link_queues.transfers
    figures = _figures(relation, ran, costs, scale)
    return Simulation(relation.spec, order, *figures, relation, ran, comm, transfers, scale)


def in_time(times: Iterable[float], scale: int) -> tuple[float, ...]:
    """Return ticks in the unit of the costs, which is `scale` ticks."""
    return tuple(times) if scale == 1 else tuple(time / scale for time in times)


def _figures(
    relation: Relation, ran: _Ran, costs: Sequence[float], scale: int
) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """Return the figures of an `Outcome`."""
    workers, steps, compute = relation.spec.num_workers, relation.num_steps, RESOURCES.index("compute")
    busy: list[float] = [0] * workers
    last: list[float] = [0] * workers
    ends: list[float] = [0] * steps
    first: list[float | None] = [None] * workers
    for number, start, end in ran:  # by start
        at = relation.worker[number]
        if relation.lane[number] % len(RESOURCES) == compute:
            busy[at] += costs[number]
        # An update that costs nothing may wait for a replica's gradients.
        if first[at] is None and (end > start or relation.actions[number].kind.per_microbatch):
            first[at] = start
        if end > start and end > last[at]:
            last[at] = end
        step = relation.step(number) if steps > 1 else 0
        if step >= 0 and end > ends[step]:
            ends[step] = end
    span = max(end - (begin or 0) for begin, end in zip(first, last, strict=True))
    makespan, span = in_time([max(last), span], scale)
    return in_time(busy, scale), in_time(ends, scale), makespan, span


class _LinkQueues:
    """Arrival times over links that differ or have a limited bandwidth. Each link queues its payloads.

    So does the uplink of a worker, which its links to all peers share.
    """

    def __init__(
        self,
        comm: float,
        links: Mapping[tuple[int, int], Link],
        payload: Callable[[Action], float] | None,
        uplinks: Mapping[int, float],
    ) -> None:
        self._comm = comm
        self._links, self._uplinks = links, uplinks
        self._payload = payload or (lambda _: 0)
        #: when a link, or the uplink of a worker, has sent all payloads so far
        self._free: dict[tuple[int, int] | int, float] = {}
        self.transfers: _Transfers = []

    def arrivals(self, relation: Relation, number: int, now: float) -> Iterator[tuple[float, list[int]]]:
        """Yield for each other worker when the payload that left at `now` arrives, and the actions that need it."""
        action, source = relation.actions[number], relation.worker[number]
        uplink = self._uplinks.get(source, float("inf"))
        for target, numbers in relation.targets(number):
            link = self._links.get((source, target))
            there = now + self._comm
            if link is not None or uplink < float("inf"):
                link = link or Link(self._comm)
                # A signal alone has no bytes.
                carries = (number, target) not in relation.signals and action.kind.resource != "control"
                size = self._payload(action) if carries else 0
                begin = max(now, self._free.get((source, target), 0), self._free.get(source, 0) if size else 0)
                sent = self._free[source, target] = begin + size / min(link.bandwidth, uplink)
                if size:
                    self._free[source] = begin + size / uplink
                there = sent + link.latency
            self.transfers.append((action, source, target, there))
            yield there, numbers


def _run(relation: Relation, costs: Sequence[float], fixed: bool, comm: float, link_queues: _LinkQueues | None) -> _Ran:
    """Simulate event by event. A planner spends most of its time here."""
    missing, lanes, own, others = relation.num_needs.copy(), relation.lane, relation.own, relation.others
    ready: list[list[int]] = [[] for _ in range(relation.num_lanes)]  # heaps of numbers with all needs met
    queues: list[list[int]] = [[] for _ in range(relation.num_lanes)]
    for number, lane in enumerate(lanes):
        queues[lane].append(number)
        if not missing[number]:
            ready[lane].append(number)  # ascending, so a heap
    issued = [0] * relation.num_lanes
    idle = [True] * relation.num_lanes
    at_once = link_queues is None and not comm
    push, pop = heapq.heappush, heapq.heappop
    #: (time, number, the actions that its arrival is for; None: it ended); -1 - number: a milestone in it
    events: list[tuple[float, int, list[int] | None]] = []
    touched, within = set(range(relation.num_lanes)), relation.within
    ran: _Ran = []
    now: float = 0
    while True:
        for lane in touched:
            heap = ready[lane]
            if heap and idle[lane] and not (fixed and heap[0] != queues[lane][issued[lane]]):
                number = pop(heap)
                issued[lane] += 1
                idle[lane] = False
                ran.append((number, now, now + costs[number]))
                push(events, (now + costs[number], number, None))
                for share, numbers in within.get(number, ()):
                    push(events, (now + share * costs[number], -1 - number, numbers))
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
                    elif link_queues is None:
                        push(events, (now + comm, number, others[number]))
                    else:
                        for there, numbers in link_queues.arrivals(relation, number, now):
                            push(events, (there, number, numbers))
            for user in arrives_for:
                missing[user] -= 1
                if not missing[user]:
                    lane = lanes[user]
                    push(ready[lane], user)
                    touched.add(lane)
    return ran
