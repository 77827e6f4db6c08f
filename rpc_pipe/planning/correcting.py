"""Correction of a profile by the times of a run, for `plan --auto`. Loads without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median

from ..dependency import B, F, I, Kind, R, Spec, U, W, worker_weight_copies
from .candidates import Candidate
from .json_fields import json_field
from .listed_schedule import program_of
from .plan import Plan
from .pricing import PricedSchedule
from .profile import Chain, LayerCost, Machines, Profile
from .search import PlanRequest
from .simulator import Cost

#: relative difference between predicted and measured time up to which a stage is not corrected
_TOLERANCE = 0.1
_KINDS = (F, B, I, W, R, U)


@dataclass(frozen=True)
class MeasuredRun:
    """The measured times of a run with a plan, in milliseconds."""

    plan: Plan
    step_ms: float
    #: by stage, the median of each kind
    stages: tuple[Mapping[Kind, float], ...] = field(metadata=json_field("stages_ms"))
    #: the largest loss of time, as the run's summary says it
    sentence: str = ""


def measured_run(plan: Plan, spec: Spec, cost: Cost, step_ms: float, sentence: str) -> MeasuredRun:
    """Return the times of a run, given those of its actions."""
    found: list[dict[Kind, list[float]]] = [defaultdict(list) for _ in range(spec.num_stages)]
    for stage, times in enumerate(found):
        for m in range(spec.num_microbatches):
            for action in spec.actions(stage, m):
                times[action.kind].append(cost(action))
        for update in spec.updates(stage, 0):
            times[U].append(cost(update))
    stages = tuple({kind: median(took) for kind, took in times.items() if median(took) > 0} for times in found)
    return MeasuredRun(plan, step_ms, stages, sentence)


def spec_of(plan: Plan, num_workers: int) -> Spec:
    """Return the spec of a plan: a named schedule, or the program that it lists."""
    if plan.program:
        return program_of(plan)(num_workers=num_workers, num_microbatches=plan.num_microbatches)
    return Candidate(plan.schedule, plan.parameters, plan.num_microbatches, plan.recompute).spec(num_workers)


def weight_copies_of(plan: Plan, num_workers: int) -> int:
    """Return the copies of the weights, in a worker's shares, on the worker with most; 1 if steps overlap."""
    spec = spec_of(plan, num_workers)
    return max(worker_weight_copies(spec, w) for w in range(num_workers)) if spec.synchronous else 1


def predicted_ms(request: PlanRequest, plan: Plan) -> float:
    """Return the predicted time of a plan's step with the profile of `request`."""
    chain = request.chain(plan.num_microbatches)
    priced = PricedSchedule(spec_of(plan, request.machines.num_workers), chain, request.machines)
    ends = chain.ends(plan.cut)
    return priced.step_time(priced.simulate(ends), ends)


def corrected(request: PlanRequest, ran: MeasuredRun) -> tuple[Profile, list[tuple[int, float]]]:
    """Return the profile corrected by a run, and (stage, measured / predicted time) of the corrected stages.

    The difference is attributed to the blocks of the stage, in proportion to their times in the profile.
    """
    plan, profile, machines = ran.plan, request.profile, request.machines
    chain = request.chain(plan.num_microbatches)
    spec, ends = spec_of(plan, machines.num_workers), chain.ends(plan.cut)
    starts = [0, *accumulate(plan.cut)]
    measured = {rows: list(costs) for rows, costs in profile.measured.items()}
    off = []
    for stage, took in enumerate(ran.stages):
        if spec.num_routes > 1:  # the measured U includes a copy of the summed gradients
            took = {kind: ms for kind, ms in took.items() if kind is not U}
        slow = _slowness(spec, machines, stage)
        expected = {kind: slow * chain.time(kind, ends[stage], ends[stage + 1]) for kind in took if kind in _KINDS}
        whole = sum(expected.values())
        ratio = sum(took[kind] for kind in expected) / whole if whole else 1.0
        if abs(ratio - 1) <= _TOLERANCE:
            continue
        off.append((stage, ratio))
        for costs in measured.values():
            for block in range(starts[stage], starts[stage + 1]):
                costs[block] = _scaled(costs[block], chain, took, slow, ends[stage], ends[stage + 1])
    return replace(profile, measured=measured), off


def _slowness(spec: Spec, machines: Machines, stage: int) -> float:
    return median(machines.slow(spec.place(stage, route)) for route in range(spec.num_routes))


def _scaled(cost: LayerCost, chain: Chain, took: Mapping[Kind, float], slow: float, a: int, b: int) -> LayerCost:
    """Return the corrected cost of a block; `took` are the measured times of its stage of blocks a to b - 1."""
    factors = {}
    if not a:  # the first stage, whose W is a whole backward
        whole = took.get(B) or (took[W] - slow * (chain.per_stage[W] - chain.per_stage[B]) if W in took else 0)
        took = {kind: ms for kind, ms in took.items() if kind not in (I, W, B)} | ({B: whole} if whole else {})
    for kind, ms in took.items():
        blocks = chain.blocks_time(kind, a, b) if kind in _KINDS else 0
        if blocks:
            factors[kind] = max(0.1, (ms / slow - chain.per_stage[kind]) / blocks)
    if B in factors:  # I and W were not measured apart
        factors = {I: factors[B], W: factors[B], **factors}
    elif I in factors and W in factors:
        whole = chain.blocks_time(I, a, b) + chain.blocks_time(W, a, b)
        parts = factors[I] * chain.blocks_time(I, a, b) + factors[W] * chain.blocks_time(W, a, b)
        factors[B] = parts / whole
    if F in factors:
        factors.setdefault(R, factors[F])
    return replace(cost, times={kind: ms * factors.get(kind, 1.0) for kind, ms in cost.times.items()})
