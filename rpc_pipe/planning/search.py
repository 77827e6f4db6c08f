"""The search of `plan` over schedules with parameters, microbatches and cuts.

Loads without torch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as numbers_from
from itertools import product
from typing import Any

from ..dependency import ConfigError, PipeError, Spec
from ..dependency.declared import with_parallelism
from ..dependency.spec import overrides
from ..schedules import SCHEDULES
from .cut_search import CutSearch
from .grouping import ALONE, Grouping
from .plan import Plan
from .pricing import CutFound
from .profile import Chain, Machines, Profile
from .slice_costs import SliceCosts
from .specs import find_schedule, make_spec
from .steady import check_some
from .unequal import LengthCost, by_microbatch

#: called with the share of the search that is done, 0 to 1, and a note of its size
Progress = Callable[[float, str], None]

#: share of the time for the first cut of every candidate
_FIRST_CUTS = 0.4


@dataclass(frozen=True)
class PlanRequest:
    """A profiled model, the machines, and the plans to choose from."""

    profile: Profile
    machines: Machines
    #: rows of a batch, and into how many microbatches it may be split
    batch: int
    microbatches: tuple[int, ...]
    recompute: bool = True
    #: names of schedules; None: all
    schedules: tuple[str, ...] | None = None
    #: into how many replicas of the pipeline the workers may be divided
    replicas: tuple[int, ...] = (1,)
    #: how these exchange gradients, by the names in `Parallelism`
    exchange: Mapping[str, Any] = field(default_factory=dict)
    #: into how many slices sequences may be cut; each number but 1 needs a profile with times by length
    slices: tuple[int, ...] = (1,)
    #: how processes may be workers
    groupings: tuple[Grouping, ...] = (ALONE,)
    #: length of the rows of each microbatch of a step, in an order of `MICROBATCH_ORDERS`; empty: as measured
    lengths: tuple[float, ...] = ()
    order: str = "given"
    #: how long to search at most
    seconds: float = float("inf")

    def chain(self, num_microbatches: int, grouping: Grouping = ALONE) -> Chain:
        """Return the blocks with their costs for a microbatch of `batch / num_microbatches` rows."""
        known, rows = self.profile, self.batch / num_microbatches
        variants = {length: [*map(grouping.cost, known.at_length(rows, length))] for length in set(self.lengths)}
        blocks, about = [*map(grouping.cost, known.at(rows))], (known.per_stage, known.ties, known.per_step)
        return Chain(blocks, *about, known.per_mib, known.model, self.slicing, variants).among(self.lengths)

    def ordered(self, spec: Spec) -> Sequence[float]:
        """Return the lengths of microbatches, in their order in the schedule; empty: as measured."""
        return by_microbatch(spec, lengths=self.lengths, order=self.order)[0] if self.lengths else ()

    @property
    def slicing(self) -> SliceCosts:
        """Costs of slices of sequences, by the measured times of rows of several lengths."""
        cost, rows, length = LengthCost.of(self.profile), min(self.profile.measured), self.profile.length
        whole = cost.seconds(rows, length)
        return SliceCosts(cost.fixed / whole, cost.attention * rows * length**2 / whole) if whole else SliceCosts()


@dataclass
class PlanResult:
    """The plans that were found."""

    #: the best cut of each candidate that fits, fastest first
    plans: list[Plan] = field(default_factory=list)
    #: the Pareto front of time and memory, fastest first
    front: list[Plan] = field(default_factory=list)
    #: if none fits: the plan that exceeds the limits of memory least, and by how many bytes
    nearest: Plan | None = None
    excess: float = 0
    #: schedules that were not simulated: their work alone takes longer than the best plan, or time was over
    left_out: list[str] = field(default_factory=list)
    #: schedules without a plan that fits
    unfit: list[str] = field(default_factory=list)


def default_microbatches(num_workers: int, batch: int) -> tuple[int, ...]:
    """Return the numbers of microbatches to try: 1, 2, 4 and 8 times the workers, at most the rows of the batch."""
    wanted = [num_workers * times for times in (1, 2, 4, 8)]
    return tuple(sorted({count for count in wanted if count <= batch} or {batch}))


def search(request: PlanRequest, tell: Progress = lambda share, note: None) -> PlanResult:
    """Return the best plans, fastest first."""
    found = _Search(request, tell)
    return found.result() if found.searches else PlanResult()


class _Search:
    def __init__(self, request: PlanRequest, tell: Progress) -> None:
        self._request, self._tell = request, tell
        self._begin = time.monotonic()
        pairs = ((count, grouping) for count, grouping in product(request.microbatches, request.groupings))
        fits = (pair for pair in pairs if pair[0] % pair[1].planes == 0 and len(request.lengths) in (0, pair[0]))
        self._chains = {pair: request.chain(*pair) for pair in fits}
        #: the most promising first
        self.searches = sorted(self._list(), key=lambda pair: pair[1].expected)
        names = {candidate.schedule for candidate, _ in self.searches}
        self._note = f"{len(self.searches)} variants of {len(names)} schedules"

    def _list(self) -> Iterator[tuple[Plan, CutSearch]]:
        q, workers = self._request, self._request.machines.num_workers
        how: Any = {"schedules": q.schedules, "replicas": q.replicas, "exchange": q.exchange, "recompute": q.recompute}
        most_stages = next(iter(self._chains.values())).num_blocks if self._chains else 0
        for grouping in q.groupings:
            counts = [count for count in q.microbatches if (count, grouping) in self._chains]
            machines = q.machines.grouped(grouping.count)
            slices = [q.slicing.balanced(count) for count in (q.slices if grouping == ALONE else (1,))]
            for each in candidates(workers, counts, most_stages=most_stages, grouping=grouping, slices=slices, **how):
                chain, spec = self._chains[each.num_microbatches, grouping], spec_of(each, workers)
                yield each, CutSearch(spec, chain, machines, q.ordered(spec))

    def _in_rounds(self) -> list[CutSearch]:
        """Return the searches in rounds: the most promising of each schedule, then the next of each."""
        turns: dict[str, Iterator[int]] = defaultdict(numbers_from)
        found = [(next(turns[candidate.schedule]), search) for candidate, search in self.searches]
        return [search for _, search in sorted(found, key=lambda pair: pair[0])]

    def result(self) -> PlanResult:
        """Search in two rounds with all candidates each.

        Hill climbing takes twenty times as long as a first cut, so all first cuts come before it.
        """
        best: CutFound | None = None
        until, done = self._begin + self._request.seconds, 0

        def is_worth(search: CutSearch, until: float) -> bool:
            nonlocal done
            self._tell(done / (2 * len(self.searches)), self._note)
            done += 1
            # That nothing fits may be reported only when everything has been looked at.
            return best is None or (search.least < best.time and time.monotonic() <= until)

        def better(found: CutFound) -> CutFound | None:
            return found if found.excess <= 0 and (best is None or found.time < best.time) else best

        ranked: list[tuple[tuple[float, float], CutSearch]] = []
        for search in self._in_rounds():
            rank = float("inf"), search.least
            if is_worth(search, self._begin + _FIRST_CUTS * self._request.seconds):
                found = search.first_cut()
                rank, best = found.rank, better(found)
            ranked.append((rank, search))
        for _, search in sorted(ranked, key=lambda pair: pair[0]):
            if is_worth(search, until):
                now = time.monotonic()
                best = better(search.climb(min(until, now + max(0.05, (until - now) / 8))))
        return self._collected()

    def _collected(self) -> PlanResult:
        result = PlanResult()
        everything = [(*pair, found) for pair in self.searches for found in pair[1].found()]
        fitting = [each for each in everything if each[2].excess <= 0]
        fitting.sort(key=lambda each: (each[2].time, max(each[2].memory)))
        plans = {id(each[1]): each for each in reversed(fitting)}  # the fastest cut of each candidate
        result.plans = [_plan(*each) for each in fitting if plans[id(each[1])] is each]
        if not fitting:
            nearest = min(everything, key=lambda each: each[2].rank)
            result.nearest, result.excess = _plan(*nearest), nearest[2].excess
        planned = {plan.schedule for plan in result.plans}
        named = {candidate.schedule for candidate, _ in self.searches}
        priced = {candidate.schedule for candidate, search in self.searches if search.priced.known}
        result.left_out, result.unfit = sorted(named - priced), sorted(priced - planned)
        least = float("inf")
        for each in fitting:
            if max(each[2].memory) < least * (1 - 1e-3):
                least = max(each[2].memory)
                result.front.append(_plan(*each))
        return result


def _plan(uncut: Plan, search: CutSearch, found: CutFound) -> Plan:
    return search.priced.plan(uncut, found.ends)


#: every schedule with its defaults, and with other parameters worth trying
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in SCHEDULES),
    ("interleaved", {"chunks": 4}),
    ("hanayo", {"waves": 2}),
    ("chimera", {"scale": "forward-doubling"}),
    ("chimera", {"pairs": 2}),
)


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise if plans cannot be made for a name.

    Raises:
        ConfigError: a name is unknown (the nearest is offered), or the schedule is a list or asynchronous.
    """
    for name in names:
        if name.endswith((".csv", ".json")):
            raise ConfigError(f"--schedule {name}: has its number of microbatches; run --schedule {name} needs no plan")
        if not find_schedule(name).synchronous:
            raise ConfigError(f"--schedule {name}: is asynchronous, so it trains other numbers; plans leave it out")


def spec_of(plan: Plan, processes: int) -> Spec:
    """Make the spec of a plan's schedule.

    Raises:
        PipeError: there is none for this number of processes.
    """
    shared = Grouping(*plan.sharing.values())
    count = plan.num_microbatches // shared.planes
    return make_spec(plan.schedule, shared.workers(processes), count, plan.schedule_options)


def candidates(
    processes: int,
    microbatches: Iterable[int],
    *,
    recompute: bool,
    most_stages: int,
    schedules: Sequence[str] | None = None,
    replicas: Sequence[int] = (1,),
    exchange: Mapping[str, Any] | None = None,
    slices: Sequence[tuple[int, ...]] = ((1,),),
    grouping: Grouping = ALONE,
) -> Iterator[Plan]:
    """Yield plans without a cut, for a number of processes: to recompute no stage, the first stages, and all.

    The first stages hold activations for longest, so these recompute first.

    Args:
        most_stages: the most stages that the model can be cut into.
        schedules: names and files; None: all synchronous ones, as asynchronous ones train other parameters.
        replicas: how many replicas of the pipeline may share the workers.
        exchange: how several exchange gradients, by the names in `Parallelism`.
        slices: the possible cuts of a sequence: sizes of slices, in parts of it.
        grouping: how processes are workers.

    Raises:
        PipeError: a schedule in a file has no variant that runs.
    """
    seen, wrong = set(), dict[str, PipeError]()
    more = [(name, own) for name in schedules or () if name not in SCHEDULES for own in find_schedule(name).variants]
    wanted = [each for each in VARIANTS if schedules is None or each[0] in schedules]
    for (name, own), number, sizes in product([*wanted, *more], replicas, slices):
        sliced = None if len(sizes) == 1 else ",".join(map(str, sizes)) if len(set(sizes)) > 1 else len(sizes)
        exchanging = (exchange or {}) if number > 1 else {}
        parameters = with_parallelism(own, replicas=number, slices=sliced, **exchanging) or {}
        for count in microbatches:
            about = {"num_workers": processes, **grouping.planned}
            plain = Plan(name, dict(parameters), num_microbatches=count, **about)
            try:
                spec = spec_of(plain, processes)
                if (name, own) in more:
                    check_some(spec)
                    if not all(map(spec.hosted, spec.workers)):
                        idle = f"leaves one of {len(spec.workers)} workers without stages"
                        raise ConfigError(f"--schedule {name}: {idle}")
            except PipeError as error:
                wrong[name] = error
                continue
            if not spec.synchronous or spec.num_stages > most_stages or (name, spec) in seen:
                continue
            seen.add((name, spec))
            yield plain
            if recompute and not type(spec).recompute and not overrides(type(spec), "actions"):
                depth = spec.num_stages
                for first in sorted({1, depth // 2, depth - 1, depth} - {0}):
                    yield replace(plain, recompute=tuple(range(first)))
    for name in (dict(more).keys() & wrong.keys()) - {name for name, _ in seen}:
        raise wrong[name]
