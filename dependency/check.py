"""The checks before the first step. Each worker checks its own part; no global pass if there is a slot.

1. every edge names an existing action of the same worker or of the same or a neighbouring stage;
2. the slot grows along every edge and no two actions of a worker share one: nothing can deadlock;
3. each action is placed on exactly one existing worker;
4. the activations kept are within what the spec claims, in its order and at the worst timing, and bounded.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from .action import PER_REPLICA, Action, F
from .draw import draw_edge, draw_held, draw_listed
from .errors import ScheduleError
from .memory import peak_at_any_timing, peak_in_order
from .order import has_program, has_slot, local_order
from .program import entries, order_limit
from .spec import ENDLESS, Spec
from .unroll import check_acyclic

#: how much of an endless stream is looked at
_ENDLESS_PREFIX = 4096


def check(spec: Spec, worker: int) -> None:
    """Check the part of `worker`: O(own actions) time and memory if the spec has a slot formula.

    Raises:
        ScheduleError: a rule is broken; the text names the action, the rule and what would be right.
    """
    _check_placement(spec)
    _check_programs(spec)
    _check_relation(spec, worker)
    _check_memory(spec, worker)


def check_all(spec: Spec) -> None:
    """Check the part of every worker, as the simulator and the launcher do before anything is started."""
    _check_placement(spec)
    _check_programs(spec)
    for rule in (_check_relation, _check_memory):
        for worker in range(spec.num_workers):
            rule(spec, worker)


def _check_placement(spec: Spec) -> None:
    for route in range(spec.num_routes):
        for stage in range(spec.num_stages):
            at = spec.place(stage, route)
            if not 0 <= at < spec.num_workers:
                raise ScheduleError(
                    f"place: stage {stage} (route {route}) is on worker {at}; workers are 0 to {spec.num_workers - 1}"
                )


def _check_programs(spec: Spec) -> None:
    """Check listed programs, all of them: only together they can be shown to run."""
    if has_slot(spec) or not has_program(spec):
        return
    programs = [list(spec.program(worker)) for worker in range(spec.num_workers)]
    for worker in range(spec.num_workers):
        _check_listed_once(spec, programs, worker)
    check_acyclic(spec, programs)


def _check_relation(spec: Spec, worker: int) -> None:
    slotted = has_slot(spec)
    for action in islice(local_order(spec, worker), _prefix(spec)):
        if action.kind not in PER_REPLICA or not spec.synchronous:
            _check_edges(spec, worker, action, slotted)


def _prefix(spec: Spec) -> int | None:
    return _ENDLESS_PREFIX if spec.num_microbatches == ENDLESS else None


def _check_edges(spec: Spec, worker: int, action: Action, slotted: bool) -> None:
    slot = spec.slot(action) if slotted else 0
    for need in spec.needs(action):
        stage, _, microbatch = need
        if not 0 <= stage < spec.num_stages or microbatch >= spec.num_microbatches:
            raise ScheduleError(
                f"after({action}) names {need}, which does not exist: "
                f"stages are 0 to {spec.last_stage}, microbatches 0 to {spec.num_microbatches - 1}"
            )
        known = spec.actions(stage, microbatch) if need.kind not in PER_REPLICA else (need,)
        if need not in known:
            raise ScheduleError(
                f"after({action}) names {need}, but of microbatch {microbatch} stage {stage} runs only the kinds "
                f"{', '.join(a.kind.value for a in known)}"
            )
        if abs(stage - action.stage) > 1 and spec.worker(need) != worker:
            raise ScheduleError(
                f"after({action}) names {need} of worker {spec.worker(need)}, which is no neighbour: "
                f"only stages {max(0, action.stage - 1)} to {min(spec.last_stage, action.stage + 1)} "
                f"and the stages of worker {worker} may be named",
                draw_edge(spec, need, action, f", {abs(stage - action.stage)} stages away") if slotted else "",
            )
        if slotted and (need.kind not in PER_REPLICA or not spec.synchronous) and spec.slot(need) >= slot:
            raise ScheduleError(
                f"{action} (slot {slot}) needs {need} (slot {spec.slot(need)}): the slot must grow along every edge",
                draw_edge(spec, need, action, f", so the slot of {need} must be the smaller one"),
            )


def _check_listed_once(spec: Spec, programs: list[list[Action]], worker: int) -> None:
    seen: set[Action] = set()
    for action in programs[worker]:
        if (at := spec.worker(action)) != worker:
            raise ScheduleError(
                f"program({worker}) lists {action}, which is placed on worker {at}: "
                "an action is run by exactly one worker",
                draw_listed(programs, action, {worker, at}),
            )
        if action in seen:
            raise ScheduleError(f"program({worker}) lists {action} twice", draw_listed(programs, action, {worker}))
        known = spec.actions(action.stage, action.microbatch)
        if action.kind not in PER_REPLICA and action not in known:
            raise ScheduleError(
                f"program({worker}) lists {action}, but of microbatch {action.microbatch} stage {action.stage} runs "
                f"only {', '.join(map(str, known))}",
                draw_listed(programs, action, {worker}),
            )
        seen.add(action)
    for stage, route in spec.hosted(worker):
        for microbatch in range(spec.num_microbatches):
            for action in spec.actions(stage, microbatch):
                if spec.route(microbatch) == route and action not in seen:
                    raise ScheduleError(
                        f"program({worker}) does not list {action}", draw_listed(programs, action, {worker})
                    )


def _check_memory(spec: Spec, worker: int) -> None:
    """Check that activations are bounded by the relation, not by luck."""
    claimed = spec.peak_activations(worker)
    if claimed is None:
        claimed = order_limit(spec, worker)
    if claimed is None and spec.num_microbatches != ENDLESS:
        # Windows do not bind while there are few microbatches; what grows with them is seen with many.
        spec = replace(spec, num_microbatches=4 * (spec.num_microbatches + spec.num_workers))
    program = list(islice(entries(spec, worker), _prefix(spec)))
    actions = [entry.action for entry in program]
    in_order = peak_in_order(actions)
    if claimed is not None and in_order > claimed:
        raise ScheduleError(
            f"worker {worker} keeps up to {in_order} microbatches of activations in slot order, "
            f"but peak_activations({worker}) promises {claimed}",
            draw_held(actions, claimed),
        )
    num_forwards = sum(action.kind is F for action in actions)
    # A flush that holds everything is a choice; what turns into everything when a gradient is late is not.
    enough = max(in_order, num_forwards - 1) if claimed is None else claimed
    at_worst = peak_at_any_timing(spec, program, enough)
    if at_worst <= enough:
        return
    promise = f"peak_activations({worker}) promises {claimed}"
    if claimed is None:
        promise = f"its order keeps {in_order}: nothing in the relation bounds memory, it grows with the microbatches"
    raise ScheduleError(
        f"worker {worker} may keep {at_worst} microbatches of activations when gradients are late, but {promise}. "
        f"A window is an edge: let after(F(s, m)) name the B or W of microbatch m - window",
        draw_held(actions, claimed or in_order, late=True),
    )
