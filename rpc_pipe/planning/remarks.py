"""Remarks on the best plan: limits of its prediction, and reasons that its numbers do not show. Loads without torch."""

from __future__ import annotations

from collections.abc import Iterator

from .plan import Plan
from .search import Candidate, PlanRequest, PlanResult


def remarks(request: PlanRequest, result: PlanResult, cores: int | None) -> Iterator[str]:
    """Yield sentences on the best plan.

    Args:
        cores: of the machine that all workers share; None: they run elsewhere, or have a GPU each.
    """
    best, workers = result.plans[0], request.machines.num_workers
    if cores is not None and cores < workers:
        yield (
            f"{workers} workers share {cores} {'core' if cores == 1 else 'cores'} here: a step may take several "
            "times as long as predicted, as actions wait for a core"
        )
    copies = num_copies(best, workers)
    if copies > 1:
        others = (plan for plan in result.plans if num_copies(plan, workers) == 1)
        other = next(others, None)
        alone = "" if other is None else f"; the fastest with one copy is {other.name}, {other.predicted_ms:.4g} ms"
        yield f"{best.name} holds {copies} copies of the weights, which its memory counts{alone}"
    if max(request.slices) > 1 and "slices" not in best.parameters:
        yield f"--slices {','.join(map(str, request.slices))}: do not pay: {_without_slices(request, result)}"


def num_copies(plan: Plan, num_workers: int) -> int:
    """Return how many copies of the weights each pipeline of a plan holds."""
    if plan.program:
        return len(plan.placement)
    spec = Candidate.of(plan).spec(num_workers)
    return spec.num_routes // spec.parallelism.replicas


def _without_slices(request: PlanRequest, result: PlanResult) -> str:
    """Return why no plan with slices is the best."""
    sliced = next((plan for plan in result.plans if "slices" in plan.parameters), None)
    fixed = f"a slice takes {request.slicing.fixed:.0%} of a sequence's time, however short it is"
    if sliced is None:
        return f"no plan with slices fits, or could be faster; {fixed}"
    return f"the fastest with slices, {sliced.name}, takes {sliced.predicted_ms:.4g} ms; {fixed}"
