"""The checks before the first step. Each worker checks its own part; no global pass if there is a slot.

1. every edge names an existing action of the same worker or of the same or a neighbouring stage;
2. the slot grows along every edge and no two actions of a worker share one: nothing can deadlock;
3. each action is placed on exactly one existing worker;
4. the peak of activations is within what the spec claims.
"""

from __future__ import annotations

from collections.abc import Iterable

from .action import Action, F, U
from .draw import draw_edge
from .errors import ScheduleError
from .order import has_program, has_slot, local_order
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
    slotted = has_slot(spec)
    live = peak = seen = 0
    release = spec.accumulates
    for action in local_order(spec, worker):
        if action.kind is not U or not spec.synchronous:
            _check_edges(spec, worker, action, slotted)
        if action.kind is F:
            live += 1
            peak = max(peak, live)
        elif action.kind is release:
            live -= 1
        seen += 1
        if seen == _ENDLESS_PREFIX and spec.num_microbatches == ENDLESS:
            break
    _check_peak(spec, worker, peak)
    if not slotted and has_program(spec):
        programs = [list(spec.program(w)) for w in range(spec.num_workers)]
        for w, program in enumerate(programs):
            _check_listed_once(spec, w, program)
        check_acyclic(spec, programs)


def check_all(spec: Spec) -> None:
    """Check the part of every worker, as the simulator and the launcher do before anything is started."""
    for worker in range(spec.num_workers):
        check(spec, worker)
        if not has_slot(spec) and has_program(spec):
            break  # one worker's check was the global one


def _check_placement(spec: Spec) -> None:
    for route in range(spec.num_routes):
        for stage in range(spec.num_stages):
            at = spec.place(stage, route)
            if not 0 <= at < spec.num_workers:
                raise ScheduleError(
                    f"place: stage {stage} (route {route}) is on worker {at}; workers are 0 to {spec.num_workers - 1}"
                )


def _check_edges(spec: Spec, worker: int, action: Action, slotted: bool) -> None:
    slot = spec.slot(action) if slotted else 0
    for need in spec.needs(action):
        stage, _, microbatch = need
        if not 0 <= stage < spec.num_stages or microbatch >= spec.num_microbatches:
            raise ScheduleError(
                f"after({action}) names {need}, which does not exist: "
                f"stages are 0 to {spec.last_stage}, microbatches 0 to {spec.num_microbatches - 1}"
            )
        if need.kind not in spec.kinds and need.kind is not U:
            raise ScheduleError(
                f"after({action}) names {need}, but this schedule has only the kinds "
                f"{', '.join(kind.value for kind in spec.kinds)} (split_backward={spec.split_backward})"
            )
        if abs(stage - action.stage) > 1 and spec.worker(need) != worker:
            raise ScheduleError(
                f"after({action}) names {need} of worker {spec.worker(need)}, which is no neighbour: "
                f"only stages {max(0, action.stage - 1)} to {min(spec.last_stage, action.stage + 1)} "
                f"and the stages of worker {worker} may be named",
                draw_edge(spec, worker, need, action) if slotted else "",
            )
        if slotted and (need.kind is not U or not spec.synchronous) and spec.slot(need) >= slot:
            raise ScheduleError(
                f"{action} (slot {slot}) needs {need} (slot {spec.slot(need)}): the slot must grow along every edge",
                draw_edge(spec, worker, need, action),
            )


def _check_listed_once(spec: Spec, worker: int, program: Iterable[Action]) -> None:
    seen: set[Action] = set()
    for action in program:
        if spec.worker(action) != worker:
            raise ScheduleError(
                f"program({worker}) lists {action}, which is placed on worker {spec.worker(action)}: "
                "an action is run by exactly one worker"
            )
        if action in seen:
            raise ScheduleError(f"program({worker}) lists {action} twice")
        seen.add(action)
    for stage, route in spec.hosted(worker):
        for microbatch in range(spec.num_microbatches):
            for kind in spec.kinds:
                if spec.route(microbatch) == route and kind(stage, microbatch) not in seen:
                    raise ScheduleError(f"program({worker}) does not list {kind(stage, microbatch)}")


def _check_peak(spec: Spec, worker: int, peak: int) -> None:
    claimed = spec.peak_activations(worker)
    if claimed is not None and peak > claimed:
        raise ScheduleError(
            f"worker {worker} keeps up to {peak} microbatches of activations in slot order, "
            f"but peak_activations({worker}) promises {claimed}"
        )
