"""The search of `plan` over schedules with parameters, microbatches and cuts: the optimum, or a plan with a known gap.

Loads without torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ..dependency import ConfigError, F, PipeError, Spec, U
from ..schedules import SCHEDULES
from .cut_search import CutFound, CutSearch
from .plan import Plan, schedule_label, with_recompute
from .profile import Chain, Machines, Profile
from .slice_costs import SliceCosts
from .specs import find_schedule, make_spec, with_replicas

#: called with the share of the search that is done, 0 to 1
Progress = Callable[[float], None]

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
    #: `zero`, `bucket` and `spread` of these, as in `Spec`
    exchange: Mapping[str, Any] = field(default_factory=dict)
    #: into how many slices sequences may be cut; each number but 1 needs a profile that has measured slices
    slices: tuple[int, ...] = (1,)
    #: how long to search; then the plan is returned with the gap that is left
    seconds: float = float("inf")

    def chain(self, num_microbatches: int) -> Chain:
        """Return the blocks with their costs for a microbatch of `batch / num_microbatches` rows."""
        profile = self.profile
        blocks = profile.at(self.batch / num_microbatches)
        return Chain(
            blocks, profile.per_stage, profile.ties, profile.per_step, profile.per_mib, profile.model, self.slicing
        )

    @property
    def slicing(self) -> SliceCosts:
        """What slices of sequences cost."""
        return next(iter(self.profile.slicing), SliceCosts())


@dataclass
class PlanResult:
    """The plans that were found, with bounds."""

    #: the best cut of each candidate that fits, fastest first
    plans: list[Plan] = field(default_factory=list)
    #: milliseconds: no schedule, cut or order can be faster with one of the requested numbers of microbatches
    lower_bound: float = 0
    #: milliseconds: no plan among those to choose from is faster
    searched_bound: float = 0
    #: the Pareto front of time and memory, fastest first
    front: list[Plan] = field(default_factory=list)
    #: if none fits: the plan that exceeds the limits of memory least, and by how many bytes
    nearest: Plan | None = None
    excess: float = 0
    #: schedules that were not simulated, with the bound in milliseconds that ruled them out
    left_out: dict[str, float] = field(default_factory=dict)
    #: schedules of which no plan that fits was found
    unfit: list[str] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """By how much, relatively, the best plan may be slower than the optimum; 0: proven optimal."""
        if not self.plans or not self.plans[0].predicted_ms:
            return 0
        return max(0.0, 1 - self.searched_bound / self.plans[0].predicted_ms)


def default_microbatches(num_workers: int, batch: int) -> tuple[int, ...]:
    """Return the numbers of microbatches to try: 1, 2, 4 and 8 times the workers, at most the rows of the batch."""
    wanted = [num_workers * times for times in (1, 2, 4, 8)]
    return tuple(sorted({count for count in wanted if count <= batch} or {batch}))


def search(request: PlanRequest, tell: Progress = lambda share: None, *, with_front: bool = False) -> PlanResult:
    """Return the best plans, fastest first, with bounds."""
    return _Search(request, tell, with_front).result()


class _Search:
    def __init__(self, request: PlanRequest, tell: Progress, with_front: bool) -> None:
        self._request = request
        self._tell = tell
        self._with_front = with_front
        self._until = time.monotonic() + request.seconds
        self._chains = {count: request.chain(count) for count in request.microbatches}
        self._searches = self._list()
        self._rounds = self._in_rounds()

    def _list(self) -> list[tuple[Candidate, CutSearch]]:
        q = self._request
        most_stages = next(iter(self._chains.values())).num_blocks if self._chains else 0
        slices = [q.slicing.balanced(count) for count in q.slices]
        searches = []
        for candidate in candidates(
            q.machines.num_workers, q.microbatches, recompute=q.recompute, most_stages=most_stages,
            schedules=q.schedules, replicas=q.replicas, exchange=q.exchange, slices=slices,
        ):  # fmt: skip
            chain = self._chains[candidate.num_microbatches]
            spec = candidate.spec(q.machines.num_workers)
            searches.append((candidate, CutSearch(spec, chain, q.machines)))
        return sorted(searches, key=lambda pair: pair[1].least)

    def _in_rounds(self) -> list[int]:
        """Return the indices of the searches in rounds: the most promising of each schedule, then the next of each."""
        turns: Counter[str] = Counter()
        found = []
        for at, (candidate, _) in enumerate(self._searches):
            name = schedule_label(candidate.schedule, candidate.parameters)
            turns[name] += 1
            found.append((turns[name], at))
        return [at for _, at in sorted(found)]

    def result(self) -> PlanResult:
        result = PlanResult()
        if not self._searches:
            return result
        best, bound = self._best(None, self._until, 0, 0.7 if self._with_front else 1)
        result.searched_bound = bound
        q = self._request
        first = min(min(q.slicing.shares(q.slicing.balanced(count))) for count in q.slices)
        result.lower_bound = min([bound, *(schedule_free_bound(chain, q.machines, count, first)
                                           for count, chain in self._chains.items())])  # fmt: skip
        if best is None:
            self._find_nearest(result)
            return result
        if self._with_front:
            self._search_front(max(best[1].memory))
        self._collect(result)
        return result

    def _best(
        self, cap: float | None, until: float, begin: float, end: float
    ) -> tuple[tuple[Candidate, CutFound] | None, float]:
        """Return the best plan within `cap` bytes, and a time that no plan within it can beat."""
        best: tuple[Candidate, CutFound] | None = None
        total = len(self._searches)

        def report(done: float) -> None:
            self._tell(begin + (end - begin) * done / total)

        def is_late(until: float) -> bool:
            # That nothing fits may be reported only when everything has been first_cuts at.
            return time.monotonic() > until and (best is not None or cap is not None)

        # Hill climbing takes twenty times as long as a first cut, so all first cuts come before it.
        first_cuts: list[tuple[tuple[float, float], int]] = []
        first_until = until if until == float("inf") else time.monotonic() + _FIRST_CUTS * (until - time.monotonic())
        for number, at in enumerate(self._rounds):
            candidate, search = self._searches[at]
            report(number / 3)
            if search.least == float("inf") or (best is not None and search.least >= best[1].time):
                continue  # no cut fits, or no cut is faster
            rank = float("inf"), search.least
            if not is_late(first_until):
                found = search.first_cut(cap)
                rank = found.rank
                if found.excess <= 0 and (best is None or found.time < best[1].time):
                    best = candidate, found
            first_cuts.append((rank, at))
        for number, (_, at) in enumerate(sorted(first_cuts)):
            candidate, search = self._searches[at]
            report(total / 3 + number / 3)
            if is_late(until) or (best is not None and search.least >= best[1].time):
                continue
            found = search.climb(min(until, time.monotonic() + self._slice(until)), cap)
            if found.excess <= 0 and (best is None or found.time < best[1].time):
                best = candidate, found
        bound = best[1].time if best is not None else float("inf")
        for number, (candidate, search) in enumerate(self._searches):
            report(2 * total / 3 + number / 3)
            better, least = search.prove(best[1] if best else None, until, cap)
            bound = min(bound, least)
            if better is not None:
                best = candidate, better
        return best, min(bound, best[1].time if best else bound)

    @staticmethod
    def _slice(until: float) -> float:
        return until if until == float("inf") else max(0.05, (until - time.monotonic()) / 8)

    def _search_front(self, memory: float) -> None:
        """Search with decreasing limits of memory; every search remembers the cuts that it has simulated."""
        for number, share in enumerate((0.85, 0.7, 0.55, 0.4, 0.3, 0.2)):
            begin = 0.7 + 0.05 * number
            left = self._until - time.monotonic()
            until = time.monotonic() + min(left, max(1.0, self._request.seconds / 12))
            found, _ = self._best(memory * share, until, begin, begin + 0.05)
            if found is None:
                break

    def _collect(self, result: PlanResult) -> None:
        plans, everything = [], []
        for candidate, search in self._searches:
            fitting = sorted(search.found(), key=lambda found: found.time)
            if fitting:
                plans.append((candidate, search, fitting[0]))
                everything += [(candidate, search, found) for found in fitting]
            elif search.was_priced or search.least == float("inf"):
                result.unfit.append(candidate.schedule)
            else:
                name = candidate.schedule
                result.left_out[name] = min(search.least, result.left_out.get(name, float("inf")))
        plans.sort(key=lambda triple: (triple[2].time, max(triple[2].memory)))
        result.plans = [_plan(*triple) for triple in plans]
        for plan in result.plans:
            result.left_out.pop(plan.schedule, None)
        known = {*result.left_out, *(plan.schedule for plan in result.plans)}
        result.unfit = sorted(set(result.unfit) - known)
        everything.sort(key=lambda triple: (triple[2].time, max(triple[2].memory)))
        least = float("inf")
        for candidate, search, found in everything:
            if max(found.memory) < least * (1 - 1e-3):
                least = max(found.memory)
                result.front.append(_plan(candidate, search, found))

    def _find_nearest(self, result: PlanResult) -> None:
        # The first cuts of all, however long they take: the excess that is reported is the least of all candidates.
        first_cuts = [(search.first_cut(), candidate, search) for candidate, search in self._searches]
        first_cuts.sort(key=lambda each: each[0].rank)
        until = time.monotonic() + min(3.0, self._request.seconds / 4)
        nearest = first_cuts[0]
        for _, candidate, search in first_cuts:
            if time.monotonic() > until:
                break
            found = search.climb(min(until, time.monotonic() + 0.3))
            nearest = min(nearest, (found, candidate, search), key=lambda each: each[0].rank)
        result.nearest, result.excess = _plan(nearest[1], nearest[2], nearest[0]), nearest[0].excess


def _plan(candidate: Candidate, search: CutSearch, found: CutFound) -> Plan:
    return search.priced.plan(candidate.schedule, dict(candidate.parameters), found.ends, candidate.recompute)


def schedule_free_bound(chain: Chain, machines: Machines, num_microbatches: int, share: float = 1) -> float:
    """Return a lower bound, in milliseconds, of a step with any schedule, cut and order.

    The workers must do all work, updates included, and the actions of one microbatch follow each other.

    Args:
        share: of a microbatch's time, what the shortest slice of its sequence takes, which runs through all stages.
    """
    slows = [machines.slow(w) for w in range(machines.num_workers)]
    fastest, blocks = min(slows), chain.num_blocks
    once = chain.blocks_time(F, 0, blocks)
    # Of the first stage this is the whole backward: the step does not end before its worker's part.
    back = chain.least_input_backward(0, blocks)
    whole = once + chain.least_backward(0, blocks)
    work = num_microbatches * whole + chain.blocks_time(U, 0, blocks)
    return max((once + back) * share * fastest, work / sum(1 / slow for slow in slows)) + chain.per_step


#: every schedule with its defaults, and with other parameters worth trying
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in SCHEDULES),
    ("interleaved", {"chunks": 4}),
    ("hanayo", {"waves": 2}),
    ("chimera", {"scale": "forward-doubling"}),
    ("chimera", {"pairs": 2}),
)


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse names of which plans cannot be made.

    Raises:
        ConfigError: a name is unknown (the nearest is offered), or that of an asynchronous schedule.
    """
    for name in names:
        find_schedule(name)
        if name not in SCHEDULES:
            raise ConfigError(f"--schedule {name}: plans are made of {', '.join(SCHEDULES)}")
        if not SCHEDULES[name].synchronous:
            raise ConfigError(f"--schedule {name}: is asynchronous, so it trains other numbers; plans leave it out")


@dataclass(frozen=True)
class Candidate:
    """A schedule with everything but the cut."""

    schedule: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    num_microbatches: int = 1
    #: stages that recompute their activations
    recompute: tuple[int, ...] = ()

    def spec(self, num_workers: int) -> Spec:
        """Make its spec.

        Raises:
            PipeError: there is none for so many workers.
        """
        return make_spec(self.schedule, num_workers, self.num_microbatches, self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The schedule's parameters for `make_spec`, recomputation included."""
        return with_recompute(self.parameters, self.recompute)


def candidates(
    num_workers: int,
    microbatches: Iterable[int],
    *,
    recompute: bool,
    most_stages: int,
    schedules: Sequence[str] | None = None,
    replicas: Sequence[int] = (1,),
    exchange: Mapping[str, Any] | None = None,
    slices: Sequence[tuple[int, ...]] = ((1,),),
) -> Iterator[Candidate]:
    """Yield the candidates for this number of workers: without recomputation, with it on the first stages, and on all.

    The first stages hold activations for longest, so these recompute first.

    Args:
        most_stages: the most stages that the model can be cut into.
        schedules: names; None: all synchronous ones, as asynchronous ones train other parameters.
        replicas: how many replicas of the pipeline may share the workers.
        exchange: `zero`, `bucket` and `spread` of these, where there are several, as in `Spec`.
        slices: into what each sequence may be cut: sizes of slices, in parts of it.
    """
    seen = set()
    for (name, own), number, sizes in product(VARIANTS, replicas, slices):
        if schedules is not None and name not in schedules:
            continue
        sliced = None if len(sizes) == 1 else ",".join(map(str, sizes)) if len(set(sizes)) > 1 else len(sizes)
        parameters = with_replicas(own, number, slices=sliced, **((exchange or {}) if number > 1 else {})) or {}
        for count in microbatches:
            plain = Candidate(name, parameters, count)
            try:
                spec = plain.spec(num_workers)
            except PipeError:
                continue
            if not spec.synchronous or spec.num_stages > most_stages or spec in seen:
                continue
            seen.add(spec)
            yield plain
            if recompute and not type(spec).recompute:
                depth = spec.num_stages
                for first in sorted({1, depth // 2, depth - 1, depth} - {0}):
                    yield Candidate(name, parameters, count, tuple(range(first)))
