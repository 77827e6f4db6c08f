"""Search of programs: the order of actions for given costs, placement, cut and microbatches. Loads without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..dependency import Action, B, I, PipeError, Spec, W, check_all
from .bounds import Ends
from .footprint import Size
from .job_shop import JobShop, Order, improve
from .listed_schedule import ListedSchedule, listed_schedule
from .plan import Plan
from .pricing import PricedSchedule
from .profile import Chain, Machines
from .search import Candidate, PlanRequest, PlanResult

#: a plan's name of its schedule if that is a searched program
SEARCHED = "searched"
#: number of plans with a placement and cut that are tried
_BASES = 4
#: how often the budget of activations is lowered by the excess of a program
_TRIES = 3


def best_order(shop: JobShop, seeds: Sequence[Order], until: float) -> tuple[float, Order] | None:
    """Return the best order that local search finds from the best of `seeds` within the budget; None: none is."""
    ran = [(run[0], at) for at, order in enumerate(seeds) if shop.fits(order) and (run := shop.evaluate(order))]
    return improve(shop, seeds[min(ran)[1]], lambda: time.monotonic() < until) if ran else None


def faster_program(
    request: PlanRequest, result: PlanResult, tell: Callable[[float], None], seconds: float
) -> Plan | None:
    """Return a plan with a program that is faster than all plans of `result` and fits; None: none was found."""
    bases = _bases(request, result)
    until = time.monotonic() + seconds
    best: Plan | None = None
    for number, (plan, spec) in enumerate(bases):
        for part, split in enumerate((True, False)):
            done = (2 * number + part) / (2 * len(bases))
            tell(done)
            left = (until - time.monotonic()) / (2 * len(bases) - 2 * number - part)
            found = _faster_program(request, plan, spec, split, time.monotonic() + left)
            if found is not None and found.predicted_ms < (best or result.plans[0]).predicted_ms * (1 - 1e-9):
                best = found
    return best


def _bases(request: PlanRequest, result: PlanResult) -> list[tuple[Plan, Spec]]:
    """Return the best plans of different placements and numbers of microbatches, with their specs."""
    found: dict[tuple[object, ...], tuple[Plan, Spec]] = {}
    for plan in result.plans:
        spec = Candidate.of(plan).spec(request.machines.num_workers)
        if (
            plan.recompute
            or type(spec).recompute
            or {"replicas", "slices"} & plan.parameters.keys()
            or plan.members > 1
        ):
            continue
        found.setdefault((*placement_of(spec), plan.num_microbatches), (plan, spec))
    return list(found.values())[:_BASES]


def _faster_program(request: PlanRequest, plan: Plan, spec: Spec, split: bool, until: float) -> Plan | None:
    machines, chain = request.machines, request.chain(plan.num_microbatches)
    ends = chain.ends(plan.cut)
    rows = PricedSchedule(spec, chain, machines).simulate(ends).orders()
    start = listed(split_backwards(rows) if split else rows, spec)
    priced = PricedSchedule(start, chain, machines)
    took = dict(zip(priced.relation.actions, priced.costs(ends), strict=True))
    sizes = priced.sizes(ends)
    limits = [machines.limit(worker) for worker in range(machines.num_workers)]
    resident = [_resident(sizes[s] for s, _ in spec.hosted(worker)) for worker in range(machines.num_workers)]
    budget = [float("inf") if limit is None else limit - own for limit, own in zip(limits, resident, strict=True)]
    for _ in range(_TRIES):
        shop = JobShop(
            start,
            took.__getitem__,
            lambda action, source, target: priced.transfer_time(action, sizes[action.stage], source, target),
            [max(size.activations, size.after_inputs) for size in sizes],
            [size.after_inputs for size in sizes],
            budget,
        )
        found = best_order(shop, [shop.from_program(start.listed.rows)], until)
        if found is None:
            return None
        made = _as_plan(listed(shop.to_program(found[1]), spec), chain, machines, ends)
        if made is None:
            return None
        over = [0 if limit is None else used - limit for used, limit in zip(made.memory_by_worker, limits, strict=True)]
        if max(over) <= 0:
            return made
        budget = [most - max(0.0, more) for most, more in zip(budget, over, strict=True)]
        until = max(until, time.monotonic() + 0.3)
    return None


def split_backwards(rows: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return an order with every backward in two parts, one after the other."""
    return [
        [part for a in row for part in ([kind(a.stage, a.index) for kind in (I, W)] if a.kind is B else [a])]
        for row in rows
    ]


def listed(rows: Sequence[Sequence[Action]], placed: Spec) -> ListedSchedule:
    """Return the spec with this order of each worker, and the placement of another."""
    schedule = listed_schedule(tuple(map(tuple, rows)), *placement_of(placed))
    return schedule(num_workers=placed.num_workers, num_microbatches=placed.num_microbatches)


def placement_of(spec: Spec) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the worker by route and stage, and the route by microbatch."""
    stages = range(spec.num_stages)
    places = tuple(tuple(spec.place(s, r) for s in stages) for r in range(spec.num_routes))
    return places, tuple(map(spec.route, range(spec.num_microbatches)))


def _resident(sizes: Iterable[Size]) -> float:
    """Return the bytes of a worker's shards, working memory, and one payload in and out of each stage."""
    hosted = list(sizes)
    working = max((size.working for size in hosted), default=0)
    return working + sum(size.shard + size.inputs + size.outputs for size in hosted)


def _as_plan(spec: ListedSchedule, chain: Chain, machines: Machines, ends: Ends) -> Plan | None:
    """Return a program as a plan, checked and simulated; None: it fails the checker."""
    try:
        check_all(spec)
    except PipeError:
        return None
    program = spec.listed
    rows = tuple(" ".join(map(str, row)) for row in program.rows)
    lists: dict[str, Any] = {"program": rows, "placement": program.placement, "routes": program.routes}
    return PricedSchedule(spec, chain, machines).plan(SEARCHED, {}, ends, **lists)
