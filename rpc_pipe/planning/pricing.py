"""The cost of a schedule for many cuts of a model, or in other shapes of an elastic job, by simulation.

Loads without torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, permutations
from statistics import median
from typing import NamedTuple

from ..dependency import NO_REDUCTIONS, Action, B, F, G, I, Kind, S, Spec, W
from ..model.sharding import cut
from .footprint import Size, copy_time, payload_bytes, peak_bytes
from .plan import Plan
from .profile import TIMED, Chain, LayerCost, Machines
from .relation import Relation
from .simulator import Link, Simulation, simulate

#: boundaries of the stages: 0, the first block of stage 1, ..., the number of blocks
Ends = tuple[int, ...]
#: more buckets of a stage would hide no more than an eighth of one replica's part of its gradients
_MOST_BUCKETS = 8


class CutFound(NamedTuple):
    """A cut with its simulated figures."""

    ends: Ends
    time: float
    #: peak bytes by worker; empty: not computed, as the cut is too slow
    memory: tuple[float, ...]
    #: by how many bytes it exceeds the limits; 0: it fits
    excess: float
    bubble: float
    busy: tuple[float, ...]
    messages: int

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: cuts that fit first, and of these the fastest."""
        return self.excess, self.time


class _LikeCost(NamedTuple):
    """The cost of actions that are alike."""

    blocks: Chain
    stage: int
    kind: Kind
    slowness: float
    #: which part of a microbatch's time its slice takes
    share: float
    #: its part of the payload, and `copy_times`
    copied: tuple[float, float, float]
    #: the stage whose bytes it copies to or from host memory
    moved: int | None


class PricedSchedule:
    """A spec on given machines, to be simulated with many cuts of a chain of blocks.

    Args:
        lengths: of the microbatches of a step, in the order of the run; empty: they are equal.
        buckets: by stage, into how many each replica's part of the gradients is divided; found for each cut.
    """

    def __init__(
        self, spec: Spec, chain: Chain, machines: Machines, lengths: Sequence[float] = (), buckets: tuple[int, ...] = ()
    ) -> None:
        self.spec = spec
        self.chain = chain
        self.machines = machines
        self._buckets = buckets or (1,) * spec.num_stages
        self.lengths = lengths
        self._with_buckets = {self._buckets: self}
        self._share = chain.slicing.time_share(spec)
        #: every simulated cut
        self.known: dict[Ends, CutFound] = {}

    @cached_property
    def relation(self) -> Relation:
        reductions = NO_REDUCTIONS._replace(buckets=self._buckets)
        return Relation(self.spec, reductions=reductions, lengths=self.lengths)

    @cached_property
    def _compiled(self) -> tuple[list[int], list[_LikeCost]]:
        """Of each action the number of its cost, and these."""
        # Actions of one (stage, kind, worker, slice, length) cost the same, so each cost is computed once.
        known: dict[tuple[int, Kind, int, float, float], int] = {}
        ids: list[int] = []
        costs: list[_LikeCost] = []
        for a, worker in zip(self.relation.actions, self.relation.worker, strict=True):
            length = self.relation.length(a)
            number = known.setdefault((a.stage, a.kind, worker, self.spec.extent(a)[0], length), len(known))
            if number == len(costs):
                costs.append(self._cost(a, worker, length))
            ids.append(number)
        return ids, costs

    def _cost(self, a: Action, worker: int, length: float) -> _LikeCost:
        chain, slow, kind = self.chain.among([length]) if length else self.chain, self.machines.slow(worker), a.kind
        if kind is G:
            slow = 0
        elif kind is S:  # of the replicas' gradients each owner sums its part
            kind, parts = G, self.relation.gradient_parts(a.stage)
            slow *= 1 / self._buckets[a.stage] - 1 / parts
        # W of the first stage is a whole backward.
        share = self._share(a._replace(kind=B) if a.kind is W and not a.stage else a)
        copied = self.relation.portion(a), *copy_times(self.spec, self.chain, a, worker)
        copies = kind.holds and kind.resource == "copy" and self.machines.copy < float("inf")
        return _LikeCost(chain, a.stage, kind, slow, share, copied, self.spec.moved(a) if copies else None)

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link] | None:
        if self.machines.links_are_plain:
            return None
        pairs = permutations(range(self.spec.num_workers), 2)
        return {pair: link_beside_copies(self.machines, self.chain, *pair) for pair in pairs}

    def costs(self, ends: Ends) -> list[float]:
        """Return the time of each action of the relation with this cut, by its number."""
        chain = self.chain
        ids, kinds = self._compiled
        costs = [
            own.time(kind, ends[stage], ends[stage + 1], share) * slow if kind in TIMED else 0
            for own, stage, kind, slow, share, _, _ in kinds
        ]
        if chain.per_byte:
            for at, (_, stage, _, _, _, (part, before, behind), _) in enumerate(kinds):
                costs[at] += part * (before * chain.inputs(ends[stage]) + behind * chain.outputs(ends[stage + 1]))
        for at, (_, _, kind, _, _, (part, _, _), moved) in enumerate(kinds):
            if moved is not None:
                costs[at] = part * copy_time(kind, chain.size(ends[moved], ends[moved + 1]), self.machines.copy)
        return [costs[i] for i in ids]

    def transfer_time(self, action: Action, size: Size, source: int, target: int) -> float:
        """Return the time of a payload from one worker to another; `size` is that of the action's stage."""
        link = link_beside_copies(self.machines, self.chain, source, target)
        return link.latency + payload_bytes(action, size, self.relation.gradient_parts(action.stage)) / link.bandwidth

    def simulate(self, ends: Ends) -> Simulation:
        """Simulate a step of the model with this cut."""
        if self._links is None:
            return simulate(self.relation, self.costs(ends), comm=self.machines.link.latency, order=self.machines.order)
        sizes, spec, machines = self.sizes(ends), self.spec, self.machines
        buckets = tuple(min(_MOST_BUCKETS, spec.num_buckets(size.gradients)) for size in sizes)
        if buckets not in self._with_buckets:
            self._with_buckets[buckets] = PricedSchedule(spec, self.chain, machines, self.lengths, buckets)
        priced = self._with_buckets[buckets]

        def payload(action: Action) -> float:
            parts = priced.relation.gradient_parts(action.stage)
            return payload_bytes(action, sizes[spec.moved(action)], parts) * priced.relation.portion(action)

        costs = priced.costs(ends)
        return simulate(
            priced.relation, costs, links=self._links, payload=payload, uplinks=machines.uplinks, order=machines.order
        )

    def step_time(self, simulation: Simulation, ends: Ends) -> float:
        """Return the time of a step in a sequence of steps, in milliseconds."""
        return simulation.span + self.tied_gradients_time(ends) + self.chain.per_step

    def found(self, ends: Ends, faster_than: float = float("inf")) -> CutFound:
        """Return a cut with its figures, simulated once; without memory if it is not faster than `faster_than`."""
        known = self.known.get(ends)
        if known is None or (not known.memory and known.time < faster_than):
            ran = self.simulate(ends)
            took = self.step_time(ran, ends)
            held, messages = (peak_bytes(ran, self.sizes(ends)), ran.messages) if took < faster_than else ((), 0)
            known = CutFound(ends, took, held, self.excess(held), ran.steady_bubble, ran.busy, messages)
            self.known[ends] = known
        return known

    def plan(self, uncut: Plan, ends: Ends) -> Plan:
        """Return a plan with this cut, and its figures."""
        _, took, memory, _, bubble, busy, messages = self.found(ends)
        return replace(
            uncut, cut=self.chain.counts(ends), predicted_ms=took, predicted_memory=max(memory), bubble=bubble,
            memory_by_worker=memory, busy_by_worker=busy, messages=messages, model=self.chain.model,
            weights_by_stage=tuple(size.weights + size.elsewhere for size in self.sizes(ends)),
        )  # fmt: skip

    def tied_gradients_time(self, ends: Ends) -> float:
        """Return the time to exchange gradients of parameters that two stages share, at the end of a step.

        The later stage's gradients arrive before the earlier stage has its last gradients, which travel at its end.
        """
        machines, spec, longest = self.machines, self.spec, 0.0
        for first, last, tie in self.chain.separated_ties(ends):
            link = machines.between(spec.place(first, 0), spec.place(last, 0))
            if spec.place(first, 0) != spec.place(last, 0):
                longest = max(longest, link.latency + tie.gradients / link.bandwidth)
        return longest

    def sizes(self, ends: Ends) -> list[Size]:
        """Return the bytes of each stage."""
        return [self.chain.size(a, b) for a, b in pairwise(ends)]

    def excess(self, memory: Sequence[float]) -> float:
        """Return by how many bytes the worst worker exceeds its limit; 0: all fit, or memory is not known."""
        limits = map(self.machines.limit, range(self.spec.num_workers))
        return max([0.0, *(used - limit for used, limit in zip(memory, limits, strict=False) if limit is not None)])


def copy_times(spec: Spec, chain: Chain, action: Action, worker: int) -> tuple[float, float]:
    """Return the compute time in ms a byte that payloads of the stage before, and of the one behind, cost a worker.

    It is 0 where the same worker has that stage.
    """
    if not action.kind.way:
        return 0.0, 0.0
    near = [each for each in (spec.origin(action), *spec.successors(action)) if each is not None]
    away = {each.stage - action.stage for each in near if spec.worker(each) != worker}
    return (-1 in away) * chain.per_byte, (1 in away) * chain.per_byte


def link_beside_copies(machines: Machines, chain: Chain, source: int, target: int) -> Link:
    """Return a link without the time of copying, which is charged to the compute of both workers (`copy_times`)."""
    link = machines.between(source, target)
    left = 1 / link.bandwidth - 2 * chain.per_byte
    return Link(link.latency, 1 / left if left > 0 else float("inf"))


#: part of the largest payload below which the time of a payload is latency alone
_SMALL = 1 / 16

#: by step: its number, its actions with start and end, and its arrivals with the sender, bytes and time; in ns
Steps = Sequence[tuple[int, Sequence[tuple[str, int, int]], Sequence[tuple[str, int, int, int]]]]


def predicted_ms(
    steps: Mapping[int, Steps], gradients: Mapping[int, float], blocks: Sequence[int], shapes: Sequence[Spec]
) -> list[float]:
    """Return the time of a step in each of the shapes, with an even cut; [] if a stage has not been measured.

    Args:
        steps: the last steps of each worker.
        gradients, blocks: their bytes, and how many there are, by stage of these steps.
    """
    slices = shapes[0].num_microbatches // shapes[0].num_whole
    found: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    ends: dict[tuple[int, int, str], int] = {}
    for worker, own in steps.items():
        for step, actions, _ in own:
            for text, begin, end in actions:
                (stage, kind, _), ends[step, worker, text] = Action.parse(text), end
                found[stage, kind].append((end - begin) / 1e6 * (slices if kind.per_microbatch else 1))
    if any((stage, F) not in found for stage in range(len(blocks))):
        return []
    arrivals = [(step, *each) for own in steps.values() for step, _, here in own for each in here]
    moved = [(size, (at - ends.get((step, peer, text), at)) / 1e6) for step, text, peer, size, at in arrivals]
    payload = median([size for _, text, _, size, _ in arrivals if Action.parse(text).kind is F] or [0])
    costs = []
    for stage, count in enumerate(blocks):
        times = {kind: median(found.get((stage, kind), [0.0])) / count for kind in TIMED}
        times[B] = times[B] or times[I] + times[W]
        held = gradients[stage] / count
        costs += [LayerCost(times, Size(weights=held, gradients=held, inputs=payload, outputs=payload))] * count
    model, link = Chain(costs), _link([each for each in moved if each[1] > 0])
    return [_step_ms(shape, model, link) for shape in shapes]


def _link(moved: Sequence[tuple[float, float]]) -> Link:
    """Return the link that fits the measured pairs of a payload's bytes and milliseconds."""
    small = _SMALL * max((size for size, _ in moved), default=0)
    large = [each for each in moved if each[0] > small]
    latency = median([ms for size, ms in moved if size <= small] or [ms for _, ms in large] or [0.0])
    rates = [size / (ms - latency) for size, ms in large if ms > latency]
    return Link(latency, median(rates) if len(large) < len(moved) and rates else float("inf"))


def _step_ms(spec: Spec, model: Chain, link: Link) -> float:
    uplinks = dict.fromkeys(range(spec.num_workers), link.bandwidth)  # a worker sends one payload after the other
    priced = PricedSchedule(spec, model, Machines(spec.num_workers, link=link, uplinks=uplinks))
    ends = model.ends([*map(len, cut(model.num_blocks, spec.num_stages))])
    return priced.step_time(priced.simulate(ends), ends)
