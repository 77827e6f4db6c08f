"""A profile corrected by what a run took, and what a plan costs then. Loads without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median
from typing import Any

from ..dependency import B, F, I, Kind, R, Spec, U, W
from .candidates import Candidate
from .json_fields import plain, read, said
from .listed_schedule import program_of
from .plan import Plan, read_plan
from .pricing import Priced
from .profile import Chain, LayerCost, Machines, Profile
from .search import Question
from .simulator import Cost

#: a stage whose actions took up to so much longer or shorter than predicted, relatively, did as predicted
_AS_PREDICTED = 0.1
_KINDS = (F, B, I, W, R, U)


@dataclass(frozen=True)
class Ran:
    """What a run with a plan took, in milliseconds."""

    plan: Plan
    step_ms: float
    #: by stage, of each kind
    stages: tuple[Mapping[Kind, float], ...] = field(metadata=said("stages_ms"))
    #: what the lost-time summary says is worst
    sentence: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**plain(self), "plan": self.plan.as_json()}


def read_ran(told: Mapping[str, Any]) -> Ran:
    """Read what `as_json` returned."""
    found: Ran = read(Ran, {**told, "plan": read_plan(told["plan"])})
    return found


def ran_with(plan: Plan, spec: Spec, cost: Cost, step_ms: float, sentence: str) -> Ran:
    """Return what a run took, from what its actions took."""
    found: list[dict[Kind, list[float]]] = [defaultdict(list) for _ in range(spec.num_stages)]
    for stage, times in enumerate(found):
        for m in range(spec.num_microbatches):
            for action in spec.actions(stage, m):
                times[action.kind].append(cost(action))
        for update in spec.updates(stage, 0):
            times[U].append(cost(update))
    stages = tuple({kind: median(took) for kind, took in times.items() if median(took) > 0} for times in found)
    return Ran(plan, step_ms, stages, sentence)


def spec_of(plan: Plan, num_workers: int) -> Spec:
    """Return the schedule of a plan, by name or as it lists it."""
    if plan.program:
        return program_of(plan)(num_workers=num_workers, num_microbatches=plan.num_microbatches)
    return Candidate(plan.schedule, plan.parameters, plan.num_microbatches, plan.recompute).spec(num_workers)


def predicted_ms(question: Question, plan: Plan) -> float:
    """Return what a step of a plan takes, from the profile of the question."""
    chain = question.chain(plan.num_microbatches)
    priced = Priced(spec_of(plan, question.machines.num_workers), chain, question.machines)
    ends = chain.ends(plan.cut)
    return priced.step(priced.simulate(ends), ends)


def corrected(question: Question, ran: Ran) -> tuple[Profile, list[tuple[int, float]]]:
    """Return the profile with the times that a run took, and (stage, how many times as long) where they differ.

    What a stage took more than predicted is taken to be its blocks', in proportion to what they take by the profile.
    """
    plan, profile, machines = ran.plan, question.profile, question.machines
    chain = question.chain(plan.num_microbatches)
    spec, ends = spec_of(plan, machines.num_workers), chain.ends(plan.cut)
    starts = [0, *accumulate(plan.cut)]
    measured = {rows: list(costs) for rows, costs in profile.measured.items()}
    off = []
    for stage, took in enumerate(ran.stages):
        if spec.num_routes > 1:  # an update has summed the replicas' gradients too, which is no time of the blocks'
            took = {kind: ms for kind, ms in took.items() if kind is not U}
        slow = _slowness(spec, machines, stage)
        expected = {kind: slow * chain.time(kind, ends[stage], ends[stage + 1]) for kind in took if kind in _KINDS}
        whole = sum(expected.values())
        ratio = sum(took[kind] for kind in expected) / whole if whole else 1.0
        if abs(ratio - 1) <= _AS_PREDICTED:
            continue
        off.append((stage, ratio))
        for costs in measured.values():
            for block in range(starts[stage], starts[stage + 1]):
                costs[block] = _scaled(costs[block], chain, took, slow, ends[stage], ends[stage + 1])
    return replace(profile, measured=measured), off


def _slowness(spec: Spec, machines: Machines, stage: int) -> float:
    return median(machines.slow(spec.place(stage, route)) for route in range(spec.num_routes))


def _scaled(cost: LayerCost, chain: Chain, took: Mapping[Kind, float], slow: float, a: int, b: int) -> LayerCost:
    """Return the cost of a block of a stage that took so long."""
    factors = {}
    if not a:  # the first stage, whose W is all of a backward
        whole = took.get(B) or (took[W] - slow * (chain.per_stage[W] - chain.per_stage[B]) if W in took else 0)
        took = {kind: ms for kind, ms in took.items() if kind not in (I, W, B)} | ({B: whole} if whole else {})
    for kind, ms in took.items():
        blocks = chain.blocks_time(kind, a, b) if kind in _KINDS else 0
        if blocks:
            factors[kind] = max(0.1, (ms / slow - chain.per_stage[kind]) / blocks)
    if B in factors:  # what is not seen apart changes with the whole
        factors = {I: factors[B], W: factors[B], **factors}
    elif I in factors and W in factors:
        whole = chain.blocks_time(I, a, b) + chain.blocks_time(W, a, b)
        parts = factors[I] * chain.blocks_time(I, a, b) + factors[W] * chain.blocks_time(W, a, b)
        factors[B] = parts / whole
    if F in factors:
        factors.setdefault(R, factors[F])
    return replace(cost, times={kind: ms * factors.get(kind, 1.0) for kind, ms in cost.times.items()})
