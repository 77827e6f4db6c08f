"""The checks of an asynchronous stream: the needs of a step in other steps, and its versions of weights."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from .action import Action, split_step
from .earlier_steps import STEADY, period, steady
from .errors import ScheduleError
from .order import has_slot
from .reductions import on_route
from .spec import Spec
from .versions import update_of, updates_a_step, updates_before

#: the number of steps at the beginning of a stream with checked versions
_BEGINNING = 8


def check_versions(spec: Spec, workers: Iterable[int]) -> None:
    """Check the declared versions and routes of a schedule with overlapping steps.

    Raises:
        ScheduleError: a step does not repeat the one before, or asks for weights that cannot be there.
    """
    if not has_slot(spec):
        raise ScheduleError(f"{type(spec).__name__}: an asynchronous schedule needs `slot`, by which steps are ordered")
    if spec.update_every not in ("step", "microbatch"):
        raise ScheduleError(f"update_every is {spec.update_every!r}: it must be step or microbatch")
    if spec.num_routes > 1:
        _check_routes(spec)
    for worker in workers:
        limit = spec.activation_limit(worker)
        if limit is not None:
            rule = "across the steps of a stream windows, edges of after(F), bound what is held"
            raise ScheduleError(f"activation_limit({worker}) is {limit}: {rule}")
        for stage, route in spec.hosted(worker):
            own = [*on_route(spec, range(spec.num_microbatches), route)]
            for m in own:
                _check_version(spec, stage, m, _BEGINNING if m in (own[0], own[-1]) else 1)


def check_steps(spec: Spec, workers: Iterable[int]) -> None:
    """Check the needs of `workers`' parts in the steps before, in time O(the workers' actions).

    Raises:
        ScheduleError: a slot does not grow along an edge, or by the same from step to step.
    """
    length = period(spec)
    if length < 1:
        raise ScheduleError(f"slot: grows by {length} from step to step; it must grow by at least 1")
    for worker in workers:
        for action in replace(spec, num_steps=1).own_actions(worker):
            _check_action(spec, worker, action, length)


def _check_routes(spec: Spec) -> None:
    if spec.update_every == "microbatch" and spec.num_separate > 1:
        raise ScheduleError(f"num_routes is {spec.num_routes}: with an update a microbatch there is one route")
    for m in range(spec.num_microbatches):
        if spec.route(m + STEADY * spec.num_microbatches) != spec.route(m):
            later = spec.route(m + STEADY * spec.num_microbatches)
            raise ScheduleError(f"route({m}) is {spec.route(m)}, and {later} in later steps: routes must repeat")
    routes, one = spec.num_routes, spec.num_separate  # behind the routes of a replica are those of the next
    for stage, first in product(range(spec.num_stages), range(0, routes, one)):
        if len({spec.place(stage, route) for route in range(first, first + one)}) > 1:
            rule = "all routes of an asynchronous schedule must hold a stage on one worker"
            raise ScheduleError(f"place({stage}, ...): {rule}")


def _check_version(spec: Spec, stage: int, m: int, begins: int) -> None:
    """Check that the version is a number that repeats from step to step and does not exceed its update."""
    M, per_step = spec.num_microbatches, updates_before(spec, spec.num_microbatches)
    settled = spec.version(stage, m + STEADY * M)
    before = updates_before(spec, m + STEADY * M)
    if settled > before:
        most = f"at most {before - STEADY * per_step} updates come before it"
        raise ScheduleError(f"version({stage}, {m}) is made by its update {update_of(spec, stage, m)} or later: {most}")
    for step in range(begins):
        version, right = spec.version(stage, m + step * M), max(0, settled - (STEADY - step) * per_step)
        if version != right:
            rule = "a version must repeat from step to step, and be 0 where that would be less"
            raise ScheduleError(f"version({stage}, {m + step * M}) is {version!r}, not {right} as later steps: {rule}")


def _check_action(spec: Spec, worker: int, action: Action, length: int) -> None:
    """Check that an action in the middle of a stream needs only earlier actions of its worker."""
    now = steady(spec, action)
    slot = spec.slot(now)
    if slot != spec.slot(action) + STEADY * length:
        slots = f"slot({now}) is {slot}, but slot({action}) is {spec.slot(action)} and steps are {length} apart"
        raise ScheduleError(f"{slots}: slots must grow by the same from step to step")
    for need in spec.needs(now):
        per_step = spec.num_microbatches if need.kind.per_microbatch else updates_a_step(spec)
        step, index = split_step(need.index, per_step)
        named = f"{need._replace(index=index)}" + (f" of {STEADY - step} steps before" if step != STEADY else "")
        if spec.worker(need) != worker:
            if step == STEADY:
                continue
            rule = "across the steps of a stream only actions of the same worker may be named"
            raise ScheduleError(f"after({action}) names {named}, of worker {spec.worker(need)}: {rule}")
        before = spec.slot(need) - STEADY * length
        if before >= slot - STEADY * length:
            rule = f"(slot {before}): the slot must grow along every edge, also from step to step"
            raise ScheduleError(f"{action} (slot {slot - STEADY * length}) needs {named} {rule}")
