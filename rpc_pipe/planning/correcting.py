"""Correction of a profile by the times of a run, for `plan --auto`. Loads without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median

from ..dependency import B, F, I, Kind, R, Spec, U, W
from .json_fields import json_field
from .listed_schedule import program_of
from .plan import Plan
from .pricing import PricedSchedule
from .profile import Chain, Machines, Profile
from .search import Candidate, PlanRequest
from .simulator import Cost

#: greatest relative difference between predicted and measured time of a stage that is not corrected
_TOLERANCE = 0.1
#: kinds that are corrected alike
_GROUPS = (F, R), (B, I, W)
_KINDS = [kind for group in _GROUPS for kind in group]


@dataclass(frozen=True)
class MeasuredRun:
    """The measured times of a run with a plan, in milliseconds."""

    plan: Plan
    step_ms: float
    #: by stage, the median of each kind
    stages: tuple[Mapping[Kind, float], ...] = field(metadata=json_field("stages_ms"))
    #: the largest loss of time, as in the run's summary
    sentence: str = ""


def measured_run(plan: Plan, spec: Spec, cost: Cost, step_ms: float, sentence: str) -> MeasuredRun:
    """Return the times of a run, given its actions' times."""
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
    return Candidate.of(plan).spec(num_workers)


def predicted_ms(request: PlanRequest, plan: Plan) -> float:
    """Return the predicted time of a plan's step with the profile of `request`."""
    chain, machines = request.of(plan)
    priced = PricedSchedule(spec_of(plan, request.machines.num_workers), chain, machines)
    ends = chain.ends(plan.cut)
    return priced.step_time(priced.simulate(ends), ends)


def corrected(request: PlanRequest, ran: MeasuredRun) -> tuple[Profile, list[tuple[int, float]]]:
    """Return the profile corrected by a run, and (stage, measured / predicted time) of the corrected stages.

    The difference is attributed to the blocks of the stage, in proportion to their times in the profile.
    """
    plan, profile = ran.plan, request.profile
    chain, machines = request.of(plan)
    spec, ends = spec_of(plan, request.machines.num_workers), chain.ends(plan.cut)
    starts = [0, *accumulate(plan.cut)]
    measured = {rows: list(costs) for rows, costs in profile.measured.items()}
    off = []
    for stage, took in enumerate(ran.stages):
        slow = _slowness(spec, machines, stage)
        expected = {kind: slow * chain.time(kind, ends[stage], ends[stage + 1]) for kind in took if kind in _KINDS}
        whole = sum(expected.values())
        ratio = sum(took[kind] for kind in expected) / whole if whole else 1.0
        if abs(ratio - 1) <= _TOLERANCE:
            continue
        off.append((stage, ratio))
        factors = _factors(chain, took, slow, ends[stage], ends[stage + 1])
        for costs in measured.values():
            for block in range(starts[stage], starts[stage + 1]):
                times = {kind: ms * factors.get(kind, 1.0) for kind, ms in costs[block].times.items()}
                costs[block] = replace(costs[block], times=times)
    return replace(profile, measured=measured), off


def _slowness(spec: Spec, machines: Machines, stage: int) -> float:
    return median(machines.slow(spec.place(stage, route)) for route in range(spec.num_routes))


def _factors(chain: Chain, took: Mapping[Kind, float], slow: float, a: int, b: int) -> dict[Kind, float]:
    """Return how many times longer blocks a to b - 1 take; `took` are the measured times of their stage."""
    factors = {}
    for group in _GROUPS:
        kinds = [kind for kind in group if kind in took]
        expected = sum(chain.time(kind, a, b) - chain.per_stage[kind] for kind in kinds)
        measured = sum(took[kind] / slow - chain.per_stage[kind] for kind in kinds)
        if expected:
            factors.update(dict.fromkeys(group, max(0.1, measured / expected)))
    return factors
