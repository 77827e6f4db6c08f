"""Advice on plans: the cost of each binding limit, changes that would make a plan fit, and remarks on the best plan.

Loads without torch.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..dependency import PipeError
from ..system.sizes import format_bytes
from .plan import Plan
from .profile import Machines
from .search import PlanRequest, PlanResult, search, spec_of
from .simulator import Link

#: number of the best schedules that are tried with a relaxed limit
_NUM_SCHEDULES = 4
#: measured times that scatter by more than this cannot distinguish plans that differ by less than the scatter
_SCATTERED = 0.15
#: relative gain above which a limit counts as binding
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Advice:
    """A change of the request, with the best plan after it."""

    change: str
    predicted_ms: float
    #: relative to the best plan without the change; 0 if none fits
    gain: float
    plan: Plan

    @property
    def sentence(self) -> str:
        """The change and its effect in words."""
        how = f"{self.predicted_ms:.4g} ms with {self.plan.name}, {self.plan.num_microbatches} microbatches"
        return f"{self.change}: {how}" + (f" ({-self.gain:+.0%})" if self.gain else "")


def binding_limits(request: PlanRequest, result: PlanResult) -> list[Advice]:
    """Return the changes that would make steps shorter, the most useful first.

    Tried are memory, links, speeds, microbatches and one more worker.
    """
    best = result.plans[0]
    names = tuple(dict.fromkeys(plan.schedule for plan in result.plans if not plan.program))[:_NUM_SCHEDULES]
    few: dict[str, Any] = {"schedules": names, "seconds": min(2.0, request.seconds / 6)}
    relaxed = _relaxed(request, result)
    tried = (_tried(change, replace(other, **few), best.predicted_ms) for change, other in relaxed)
    return sorted((each for each in tried if each and each.gain > _LEAST_GAIN), key=lambda each: -each.gain)


def _tried(change: str, request: PlanRequest, before: float = 0) -> Advice | None:
    """Return the change with its best plan; `before`: time of a step without it, 0 if nothing fits."""
    plan: Plan | None = None
    with suppress(PipeError):  # a schedule in a file may have no variant for other workers
        plan = next(iter(search(request).plans), None)
    if plan is None:
        return None
    return Advice(change, plan.predicted_ms, 1 - plan.predicted_ms / before if before else 0, plan)


def _relaxed(request: PlanRequest, result: PlanResult) -> Iterator[tuple[str, PlanRequest]]:
    machines = request.machines
    if any(limit is not None for limit in machines.memory):
        yield "without the limit of memory", replace(request, machines=replace(machines, memory=()))
    if machines.link != Link() or machines.links or machines.uplinks:
        free = replace(machines, link=Link(), links={}, uplinks={})
        yield "if links took no time", replace(request, machines=free)
    if len(set(machines.slowness)) > 1:
        fastest = (min(machines.slowness),) * machines.num_workers
        alike = replace(machines, slowness=fastest)
        yield "if all workers were as fast as the fastest", replace(request, machines=alike)
    most = max(request.microbatches)
    if result.plans and result.plans[0].num_microbatches == most and 2 * most <= request.batch:
        yield f"with {2 * most} microbatches", replace(request, microbatches=(2 * most,))
    yield "with one worker more", replace(request, machines=more_workers(machines, 1))


def more_workers(machines: Machines, number: int) -> Machines:
    """Return the machines with `number` more workers like the last."""
    slowness = machines.slowness + machines.slowness[-1:] * number
    memory = machines.memory + machines.memory[-1:] * number
    return replace(machines, num_workers=machines.num_workers + number, slowness=slowness, memory=memory)


def changes_that_fit(request: PlanRequest, result: PlanResult) -> list[Advice]:
    """Return the changes that make a plan fit where none does.

    Tried are recomputation, smaller microbatches and more workers; named is the memory that the nearest plan lacks.
    """
    asked = replace(request, recompute=True, seconds=min(3.0, request.seconds / 4))
    found = [] if request.recompute else [_tried("recompute", asked)]
    largest, batch = max(request.microbatches), request.batch
    if smaller := sorted({count for count in (2 * largest, 4 * largest, batch) if largest < count <= batch}):
        found.append(_tried("smaller microbatches", replace(asked, microbatches=tuple(smaller))))
    num_workers = request.machines.num_workers
    wanted = {num_workers + 1, *(times * num_workers for times in (2, 4, 8))}
    for count in sorted({min(each, max(num_workers, request.profile.num_blocks)) for each in wanted} - {num_workers}):
        machines = more_workers(request.machines, count - num_workers)
        counts = tuple(sorted({*request.microbatches, min(batch, count)}))
        if fitting := _tried(f"{count} workers", replace(asked, machines=machines, microbatches=counts)):
            found.append(fitting)
            break
    if (nearest := result.nearest) is not None:
        limit = request.machines.grouped(nearest.sharing.get("members", 1)).limit
        needs = [(at, used) for at, used in enumerate(nearest.memory_by_worker) if used > (limit(at) or float("inf"))]
        over = ", ".join(f"worker {at} {format_bytes(used)}" for at, used in needs)
        found.append(Advice(f"memory for {over}", nearest.predicted_ms, 0, nearest))
    return [advice for advice in found if advice is not None]


def remarks(request: PlanRequest, result: PlanResult, cores: int | None) -> Iterator[str]:
    """Yield sentences on the best plan.

    Args:
        cores: of the machine that all workers share; None: they run elsewhere, or have a GPU each.
    """
    best, workers = result.plans[0], request.machines.num_workers
    if cores is not None and cores < workers:
        share = f"{workers} workers share {cores} {'core' if cores == 1 else 'cores'} here"
        yield f"{share}: a step may take several times as long as predicted, as actions wait for a core"
    if request.profile.scatter > _SCATTERED:
        scatter = f"measured times scatter by {request.profile.scatter:.0%}"
        yield f"{scatter}, so close plans may be as fast: profile --again on a quiet machine measures anew"
    copies = num_copies(best, workers)
    if copies > 1:
        other = next((plan for plan in result.plans if num_copies(plan, workers) == 1), None)
        alone = "" if other is None else f"; the fastest with one copy is {other.name}, {other.predicted_ms:.4g} ms"
        yield f"{best.name} holds {copies} copies of the weights, which its memory counts{alone}"
    if max(counts := request.slices) > 1 and "slices" not in best.parameters:
        sliced = next((plan for plan in result.plans if "slices" in plan.parameters), None)
        why = "no plan with slices fits, or could be faster"
        if sliced is not None:
            why = f"the fastest with slices, {sliced.name}, takes {sliced.predicted_ms:.4g} ms"
        fixed = f"a slice takes {request.slicing.fixed:.0%} of a sequence's time, however short it is"
        yield f"--slices {','.join(map(str, counts))}: do not pay: {why}; {fixed}"


def num_copies(plan: Plan, num_workers: int) -> int:
    """Return how many copies of the weights each pipeline of a plan holds."""
    if plan.program:
        return len(plan.placement)
    spec = spec_of(plan, num_workers)
    held = sum(len(spec.hosted(worker)) for worker in spec.workers)
    return held // (spec.num_stages * int(plan.parameters.get("replicas", 1)))
