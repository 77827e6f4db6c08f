"""The checks before the first step. Each worker checks its part; there is no global pass if there is a slot.

1. every edge names an existing action of the same worker or of the same or a neighbouring stage;
2. the slot grows along every edge and no two actions of a worker share one: nothing can deadlock;
3. each action is placed on exactly one existing worker;
4. the activations kept are bounded, and within the spec's claim, in its order and at the worst timing; so are stages'
   weights, if the spec claims a number.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from numbers import Integral
from traceback import walk_tb
from typing import Any

from .action import Action, Kind
from .errors import PipeError, ScheduleError
from .memory import UNSURE, WINDOW, Memory
from .order import has_program, has_slot, local_order
from .program import order_limit
from .spec import Spec
from .versions import updates_a_step


@contextmanager
def schedule_errors() -> Iterator[None]:
    """Turn an exception inside a method of a user's schedule into one that names the method.

    Raises:
        ScheduleError: instead of that exception.
    """
    try:
        yield
    except PipeError:
        raise
    except Exception as error:
        ours = __name__.partition(".")[0]
        for frame, line in walk_tb(error.__traceback__):
            module, code = str(frame.f_globals.get("__name__")), frame.f_code
            # Methods that dataclasses generate are in no file.
            if module.partition(".")[0] != ours and not code.co_filename.startswith("<"):
                where, name = f"line {line} of {code.co_filename}", code.co_name
                if isinstance(spec := frame.f_locals.get("self"), Spec):
                    name = f"{type(spec).__name__}.{name}"
                raise ScheduleError(f"{name} raised {type(error).__name__}: {error} ({where})") from error
        raise ScheduleError(
            f"a method of the schedule takes other arguments, or returned another type: {error} (docs/schedules.md)"
        ) from error


def _check_answers(spec: Spec) -> None:
    """Check the answers of a user's schedule; the built-in ones are tested."""
    classes = type(spec).__mro__[: type(spec).__mro__.index(Spec)]
    if any(cls.__module__.partition(".")[0] != __name__.partition(".")[0] for cls in classes):
        from .answers import check_answers

        check_answers(spec)


def actions_in(answer: object, call: str) -> list[Action]:
    """Return the actions that `call` returned.

    Raises:
        ScheduleError: it is no list of actions, or a field of an action has another type.
    """
    actions: list[Any] = [None]
    if isinstance(answer, Iterable) and not isinstance(answer, (str, Action)):
        actions = list(answer)
    if not all(isinstance(action, Action) for action in actions):
        rule = "it must return a list of actions such as F(stage, microbatch), [] if there are none"
        raise ScheduleError(f"{call} returned {answer!r}: {rule}")
    for stage, kind, index in actions:
        if type(kind) is not Kind or not (isinstance(stage, Integral) and isinstance(index, Integral)):
            made = f"Action({stage!r}, {kind!r}, {index!r})"
            raise ScheduleError(f"{call} returned {made}: fields are stage, kind, index; write F(stage, microbatch)")
    return actions


def check(spec: Spec, worker: int) -> None:
    """Check the part of `worker`, in time and memory O(the worker's actions) if the spec has a slot formula.

    Raises:
        ScheduleError: a rule is broken; the text names the action, the rule and a right value.
    """
    _check_once(spec, range(worker, worker + 1))


def check_all(spec: Spec) -> None:
    """Check the part of every worker, as the simulator and the launcher do before anything is started."""
    _check_once(spec, range(spec.num_workers))


def _check_once(spec: Spec, workers: range) -> None:
    """Check unless an equal schedule has passed: commands and pipelines ask for the same one after each other."""
    try:
        hash(spec)
    except TypeError:  # a parameter of a user's schedule may be a list
        _check_workers.__wrapped__(spec, workers)
    else:
        _check_workers(spec, workers)


@lru_cache(128)
def _check_workers(spec: Spec, workers: range) -> None:
    with schedule_errors():
        _check_answers(spec)
        _check_parts(spec, workers)
        memory = Memory(spec)
        for worker in workers:
            _check_memory(memory, worker)


def _check_parts(spec: Spec, workers: Sequence[int]) -> None:
    if spec.synchronous:
        check_runs(spec, workers)
        return
    from .check_stream import check_steps, check_versions

    check_versions(spec, workers)
    check_runs(spec, workers)
    check_steps(spec, workers)


def check_runs(spec: Spec, workers: Iterable[int]) -> None:
    """Check that the parts of `workers` can be run: each part alone if there are slots, else all together."""
    if has_slot(spec):
        for worker in workers:
            for action in local_order(spec, worker):
                _check_needs(spec, worker, action, slotted=True)
        return
    for worker in spec.workers:
        for action in spec.own_actions(worker):
            _check_needs(spec, worker, action, slotted=False)
    if has_program(spec):
        programs = {w: actions_in(spec.program(w), f"program({w})") for w in spec.workers}
        from .unroll import check_acyclic, check_listed_once

        for worker in spec.workers:
            check_listed_once(spec, programs, worker, _why_not_run)
        check_acyclic(spec, list(programs.values()))
    else:
        next(local_order(spec, 0), None)  # unrolls the whole


def _check_needs(spec: Spec, worker: int, action: Action, *, slotted: bool) -> None:
    """Check the needs of `action`, unless it ends a synchronous step, which no schedule declares."""
    if not spec.orders(action):
        return
    for need in actions_in(spec.after(action), f"after({action})"):
        if need.index < 0:
            continue
        wrong = _why_not_run(spec, need)
        if wrong:
            raise ScheduleError(f"after({action}) names {need}{wrong}")
        # Where workers have died, several may have the stages of one. A payload may leave the last stage.
        apart = abs(need.stage - action.stage) > 1 and spec.worker(need) != worker
        apart = apart and action not in spec.successors(need)
        if apart and len(spec.workers) == spec.num_workers:
            from .unroll import draw_edge

            away = abs(need.stage - action.stage)
            near = f"stages {max(0, action.stage - 1)} to {min(spec.last_stage, action.stage + 1)}"
            rule = f"only {near} and the stages of worker {worker} may be named"
            drawing = draw_edge(spec, need, action, f", {away} stages away") if slotted else ""
            named = f"after({action}) names {need} of worker {spec.worker(need)}, which is no neighbour"
            raise ScheduleError(f"{named}: {rule}", drawing)
    for need in spec.needs(action) if slotted else ():
        slot, before = spec.slot(action), spec.slot(need)
        if before >= slot:
            from .unroll import draw_edge

            rule = f"{action} (slot {slot}) needs {need} (slot {before}): the slot must grow along every edge"
            raise ScheduleError(rule, draw_edge(spec, need, action, f", so the slot of {need} must be the smaller one"))


def _why_not_run(spec: Spec, action: Action) -> str:
    """Return why `action` is none that a schedule may name; "": it is one."""
    stage, kind, index = action
    if not spec.orders(action):
        return f", but {kind!r} ends the step: only what is done with a microbatch may be named"
    counted, most = "microbatches", spec.total_microbatches
    if not kind.per_microbatch:
        counted, most = "updates", updates_a_step(spec) * spec.num_steps
    if not 0 <= stage < spec.num_stages or not 0 <= index < most:
        return f", which does not exist: stages are 0 to {spec.last_stage}, {counted} 0 to {most - 1}"
    known = spec.actions(stage, index) if kind.per_microbatch else [action]
    if action not in known:
        return f", but of microbatch {index} stage {stage} runs only {', '.join(map(str, known))}"
    return ""


def _check_memory(memory: Memory, worker: int) -> None:
    """Check that the relation bounds activations, at any timing, and weights if the spec claims a bound."""
    spec = memory.spec
    if (claimed := spec.peak_weights(worker)) is not None:
        _check_claim(memory, worker, claimed, "weights", "stages' weights", "Let an action that loads wait for a drop")
    claimed = spec.peak_activations(worker)
    if claimed is None:
        claimed = order_limit(spec, worker)
    if claimed is None:
        from .answers import check_growth

        check_growth(memory, worker, check_runs)
        return
    _check_claim(memory, worker, claimed, "activations", "microbatches of activations when gradients are late", WINDOW)


def _check_claim(memory: Memory, worker: int, claimed: int, what: str, told: str, advice: str) -> None:
    lives, is_exact = memory.at_any_timing(worker, lambda lives: lives.most[-1] <= claimed, what)
    if lives.most[-1] > claimed:
        from .unroll import draw_held

        keeps = f"worker {worker} may keep {lives.most[-1]} {told}{UNSURE * (not is_exact)}"
        held = draw_held(lives.run_to_most(), claimed - lives.most[0])
        raise ScheduleError(f"{keeps}, but peak_{what}({worker}) promises {claimed}. {advice}", held)
