"""Programs that are searched for a model's costs, where placement, cut and microbatches are settled. Without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..dependency import Action, F, Kind, PipeError, Spec, check_all
from .bottleneck import Ends
from .candidates import Candidate
from .job_shop import RULES, Order, Shop, improve, list_schedule
from .listed_schedule import listed_schedule
from .plan import Plan
from .pricing import Priced, copying, way
from .profile import Chain, Machines
from .search import Answer, Question

#: the name of a searched program in a plan
SEARCHED = "searched"
#: plans whose placement and cut are taken up
_BASES = 4
#: how often the budget of activations is lowered by what a program holds too much
_TRIES = 3


@dataclass(frozen=True)
class Program:
    """An order that was found."""

    time: float
    rows: tuple[tuple[Action, ...], ...]
    #: route -> stage -> worker
    placement: tuple[tuple[int, ...], ...]
    #: microbatch -> route
    routes: tuple[int, ...]

    @property
    def schedule(self) -> type[Spec]:
        """The schedule that runs it."""
        return listed_schedule(self.rows, self.placement, self.routes)


def best_order(shop: Shop, seeds: Sequence[Order], until: float, goal: float = 0.0) -> tuple[float, Order] | None:
    """Return the shortest order found from `seeds` and from list scheduling, within the budget; None: none fits it."""
    # List scheduling takes what it takes, but half of the time is left for the moves. What is known already is enough
    # where there is none.
    begun = time.monotonic()
    orders = [order for order in seeds if shop.fits(order)]
    known = bool(orders)
    for rule in RULES:
        if known and time.monotonic() - begun > (until - begun) / 2:
            break
        listed = list_schedule(shop, rule)
        known = True
        if listed is not None and shop.fits(listed):
            orders.append(listed)
    ran = [(run[0], number) for number, order in enumerate(orders) if (run := shop.run(order)) is not None]
    ran.sort()
    best: tuple[float, Order] | None = None
    starts = ran[:3]
    for number, (_, at) in enumerate(starts):
        if best is not None and best[0] <= goal * (1 + 1e-12):
            break
        left = until - time.monotonic()
        end = time.monotonic() + max(0.0, left / (len(starts) - number))
        found = improve(shop, orders[at], lambda end=end: time.monotonic() < end, goal=goal)  # type: ignore[misc]
        if best is None or found[0] < best[0]:
            best = found
    return best


def improved(question: Question, answer: Answer, tell: Callable[[float], None], seconds: float) -> Plan | None:
    """Return a program that is faster than all plans and fits; None: none was found."""
    bases = _bases(question, answer)
    until = time.monotonic() + seconds
    best: Plan | None = None
    for number, (plan, spec) in enumerate(bases):
        for part, split in enumerate((True, False)):
            done = (2 * number + part) / (2 * len(bases))
            tell(done)
            left = (until - time.monotonic()) / (2 * len(bases) - 2 * number - part)
            found = _improved(question, plan, spec, split, time.monotonic() + left)
            if found is not None and found.predicted_ms < (best or answer.plans[0]).predicted_ms * (1 - 1e-9):
                best = found
    return best


def _bases(question: Question, answer: Answer) -> list[tuple[Plan, Spec]]:
    """Return the best plans of different placements, microbatches and cuts."""
    found: dict[tuple[object, ...], tuple[Plan, Spec]] = {}
    for plan in answer.plans:
        spec = Candidate(plan.schedule, plan.parameters, plan.num_microbatches).spec(question.machines.num_workers)
        if plan.recompute or type(spec).recompute:
            continue
        found.setdefault((*placement_of(spec), plan.num_microbatches), (plan, spec))
    return list(found.values())[:_BASES]


def _improved(question: Question, plan: Plan, spec: Spec, split: bool, until: float) -> Plan | None:
    machines, chain = question.machines, question.chain(plan.num_microbatches)
    ends = chain.ends(plan.cut)
    priced = Priced(spec, chain, machines)
    seed = priced.simulate(ends).orders()
    limits = [machines.limit(worker) for worker in range(machines.num_workers)]
    resident = _resident(spec, chain, ends)
    budget = [float("inf") if limit is None else limit - own for limit, own in zip(limits, resident, strict=True)]
    for _ in range(_TRIES):
        shop = shop_of(spec, chain, machines, ends, budget, split=split)
        found = best_order(shop, [shop.from_program(seed)], until)
        if found is None:
            return None
        program = Program(found[0], shop.to_program(found[1]), *placement_of(spec))
        made = planned(program, chain, machines, ends)
        if made is None:
            return None
        over = [0 if limit is None else used - limit for used, limit in zip(made.memory_by_worker, limits, strict=True)]
        if max(over) <= 0:
            return made
        budget = [most - max(0.0, more) for most, more in zip(budget, over, strict=True)]
        until = max(until, time.monotonic() + 0.3)
    return None


def placement_of(spec: Spec) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the worker by route and stage, and the route of each microbatch."""
    stages = range(spec.num_stages)
    places = tuple(tuple(spec.place(s, r) for s in stages) for r in range(spec.num_routes))
    return places, tuple(map(spec.route, range(spec.num_microbatches)))


def _resident(spec: Spec, chain: Chain, ends: Ends) -> list[float]:
    """Return what each worker has all the time, with one payload that comes and one that goes for each stage."""
    found = []
    for worker in range(spec.num_workers):
        sizes = [chain.size(ends[s], ends[s + 1]) for s, _ in spec.hosted(worker)]
        working = max((size.working for size in sizes), default=0)
        found.append(working + sum(size.shard + size.inputs + size.outputs for size in sizes))
    return found


def shop_of(spec: Spec, chain: Chain, machines: Machines, ends: Ends, budget: Sequence[float], *, split: bool) -> Shop:
    """Return what is to be ordered, for a model that is cut."""
    sizes = [chain.size(a, b) for a, b in pairwise(ends)]
    table: dict[tuple[int, Kind, int], float] = {}

    def cost(action: Action) -> float:
        stage, kind, _ = action
        worker = spec.worker(action)
        known = table.get((stage, kind, worker))
        if known is None:
            known = chain.time(kind, ends[stage], ends[stage + 1]) * machines.slow(worker)
            before, behind = copying(spec, chain, stage, kind, worker)
            known += before * sizes[stage].inputs + behind * sizes[stage].outputs
            table[stage, kind, worker] = known
        return known

    def lag(action: Action, source: int, target: int) -> float:
        link = way(machines, chain, source, target)
        size = sizes[action.stage]
        return link.latency + (size.outputs if action.kind is F else size.inputs) / link.bandwidth

    kept = [max(size.activations, size.after_inputs) for size in sizes]
    return Shop(spec, cost, lag, kept, [size.after_inputs for size in sizes], budget, split, repeated=True)


def planned(program: Program, chain: Chain, machines: Machines, ends: Ends) -> Plan | None:
    """Return a program as a plan, proven by the checker and priced by the simulator; None: it does not pass."""
    spec = program.schedule(num_workers=machines.num_workers, num_microbatches=len(program.routes))
    try:
        check_all(spec)
    except PipeError:
        return None
    rows = tuple(tuple(map(str, row)) for row in program.rows)
    lists: dict[str, Any] = {"program": rows, "placement": program.placement, "routes": program.routes}
    return Priced(spec, chain, machines).plan(SEARCHED, {}, ends, **lists)
