"""`plan --auto` and `run --plan auto`: a plan that is kept beside the model, and replaced when a run shows a better.

run 1    measures and plans; at its end the times of its actions are noted
run 2    the noted times correct the profile; if another plan is then faster, the run takes it and prints one line
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..dependency.parallelism import OPTIONS
from ..launching import launcher_link as link
from ..planning.correcting import MeasuredRun, corrected, measured_run, predicted_ms
from ..planning.json_fields import from_json_value, to_json_value
from ..planning.plan import Plan, read_plan
from ..planning.profile_file import as_json
from ..planning.search import PlanRequest, search
from ..system.files import DAMAGED, read_json
from ..tracing.lost_time import LostTime
from ..tracing.trace import Trace
from .options import NOTED_PLAN
from .output_files import write

#: prefix of files with the times of runs
_RAN = "ran-"
#: least relative gain for which a kept plan is replaced
WORTHWHILE = 0.02
#: options that a kept plan must share
_ASKED = (
    "workers", "memory", "batch", "microbatches", *OPTIONS, "members", "shard", "reduce", "topology", "link",
    "schedule", "no_recompute", "seconds",
)  # fmt: skip


class Auto:
    """The plan that is kept for a model, beside its profile."""

    def __init__(self, profile_path: Path) -> None:
        name = profile_path.name.removeprefix("profile-")
        self.profile_path = profile_path
        self.plan_path = profile_path.with_name(f"plan-{name}")
        self.note_path = profile_path.with_name(f"{_RAN}{name}")

    def settle(self, request: PlanRequest, asked: Mapping[str, Any]) -> tuple[PlanRequest, str]:
        """Make sure that the best known plan is kept; return the (corrected) request, and a message.

        Raises:
            ConfigError: nothing fits.
        """
        asked = json.loads(json.dumps({name: asked[name] for name in _ASKED if name in asked}))  # as it is kept
        kept = self._kept(request, asked)
        if kept is None:
            plan = _best(request)
            self._keep(request, plan, asked)
            return request, f"planned: {_tell(plan)}"
        ran = self._noted(kept)
        if ran is None:
            return request, f"plan kept, as no run has been noted since: {_tell(kept)}"
        profile, off = corrected(request, ran)
        if off:
            request = replace(request, profile=profile)
            write(str(self.profile_path), json.dumps(as_json(profile), indent=1))
        self.note_path.unlink(missing_ok=True)
        before = predicted_ms(request, kept)
        plan = _best(request)
        gain = 1 - plan.predicted_ms / before if before else 0.0
        differ = ", ".join(f"stage {stage} took {ratio:.2g} x what was predicted" for stage, ratio in off)
        differ = differ or "all stages took what was predicted"
        seen = f"in the last run {differ} (its lost time: {ran.sentence})"
        if gain < WORTHWHILE:
            return request, f"plan kept, none is {WORTHWHILE:.0%} faster: {_tell(kept)}; {seen}"
        self._keep(request, plan, asked)
        return request, (
            f"planned again: {_tell(plan)} instead of {kept.name}, cut {_cut(kept)}, which would take "
            f"{before:.4g} ms ({-gain:+.0%}): {seen}"
        )

    def _kept(self, request: PlanRequest, asked: Mapping[str, Any]) -> Plan | None:
        try:
            told = read_json(self.plan_path, str(self.plan_path))
            plan = read_plan(told)
        except DAMAGED:  # or missing
            return None
        same = told.get("asked") == asked and plan.num_workers == request.machines.num_workers
        return plan if same and sum(plan.cut) == request.profile.num_blocks else None

    def _noted(self, plan: Plan) -> MeasuredRun | None:
        try:
            ran: MeasuredRun = from_json_value(MeasuredRun, read_json(self.note_path, str(self.note_path)))
        except DAMAGED:
            return None
        if "slices" in plan.parameters:  # times of slices are not times of microbatches
            return None
        return ran if ran.plan.cut == plan.cut and len(ran.stages) == len(plan.cut) else None

    def _keep(self, request: PlanRequest, plan: Plan, asked: Mapping[str, Any]) -> None:
        told = {"plans": [plan.as_json()], "asked": asked, "note": str(self.note_path)}
        write(str(self.plan_path), json.dumps(told, indent=1))
        self.note_path.unlink(missing_ok=True)  # the times are of another plan


def _best(request: PlanRequest) -> Plan:
    result = search(request)
    if not result.plans:
        raise ConfigError("plan --auto: nothing fits; rpc-pipe plan says by how much, and what would")
    return result.plans[0]


def _tell(plan: Plan) -> str:
    return f"{plan.name}, {plan.num_microbatches} microbatches, cut {_cut(plan)}: {plan.predicted_ms:.4g} ms a step"


def _cut(plan: Plan) -> str:
    return ",".join(map(str, plan.cut))


def let_note(path: str) -> None:
    """Record the times of the coming run with the plan in this file, if the plan is one that is kept."""
    if _note_of(path):
        os.environ[NOTED_PLAN] = path


def note(trace: Trace, lost: LostTime) -> None:
    """Record the times of a run, unless these are of unequal microbatches: prices are of equal ones."""
    path = os.environ[NOTED_PLAN]
    if trace.lengths(len(trace.steps)):
        link.tell(kind="text", text="--plan auto: microbatches were unequal, and correct no price; plan by --lengths")
        return
    ran = measured_run(read_plan(path), trace.spec, trace.cost(), trace.step_ms, lost.sentence)
    try:
        write(_note_of(path), json.dumps(to_json_value(ran)))
    except OSError as error:
        link.tell(kind="text", text=f"what the run took cannot be noted for --plan auto: {error}")


def _note_of(path: str) -> str:
    """Return the file for the times of runs with the plan in this file; "" if they are not recorded."""
    try:
        note = str(read_json(Path(path), path)["note"])
    except DAMAGED:
        return ""
    return note if Path(note).name.startswith(_RAN) else ""  # another job's plan may not overwrite any file
