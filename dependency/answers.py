"""Validation of a schedule's methods: a wrong type or an exception becomes an error that names the method."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from numbers import Integral
from types import CodeType, TracebackType
from typing import get_args

from .action import Action, Kind
from .errors import PipeError, ScheduleError
from .kinds import B, F, I, W
from .reductions import on_route
from .spec import Order, Spec

#: properties of a schedule that are numbers, its methods, and methods that return bounds
_NUMBERS = ("num_workers", "num_microbatches", "num_stages", "num_routes")
_METHODS = ("place", "route", "splits", "recomputes", "after", "slot", "program", "version")
_BOUNDS = ("activation_limit", "peak_activations")
#: properties that a schedule may declare
_DECLARED = ("num_stages", "num_routes", "order", "split_backward", "recompute", "synchronous", "update_every")
#: methods of Spec that a schedule must not override
_FOLLOWS = (
    "updates",
    "worker",
    "hosted",
    "origin",
    "successors",
    "data",
    "accumulations",
    "needs",
    "orders",
    "parameters",
)
#: an iterable of more actions counts as endless
_MOST_NAMED = 1_000_000


@contextmanager
def schedule_errors(schedule: type[Spec]) -> Iterator[None]:
    """Turn an exception inside a method of the schedule into one that names the method and its arguments.

    Raises:
        ScheduleError: instead of that exception.
    """
    try:
        yield
    except PipeError:
        raise
    except (Exception, SystemExit) as raised:
        # A StopIteration inside a generator becomes a RuntimeError (PEP 479).
        error = raised.__cause__ if isinstance(raised.__cause__, StopIteration) else raised
        call = _first_call(schedule, error.__traceback__)
        if call is None:
            raise
        where = _last_line(error.__traceback__)
        raise ScheduleError(f"{call} raised {type(error).__name__}: {error} ({where})") from error


def _first_call(schedule: type[Spec], traceback: TracebackType | None) -> str | None:
    """Return the outermost call of a method of `schedule` that is not `Spec`'s own, as it would be typed."""
    while traceback is not None:
        frame = traceback.tb_frame
        name = _name_of(schedule, frame.f_code)
        if name is not None and not _is_ours(frame.f_code, frame.f_globals):
            names, rest, _, values = inspect.getargvalues(frame)
            asked_with = [*(values[each] for each in names[1:]), *(values[rest] if rest else ())]
            is_property = not callable(inspect.getattr_static(schedule, name))
            return name if is_property else f"{name}({', '.join(map(repr, asked_with))})"
        traceback = traceback.tb_next
    return None


def _name_of(schedule: type[Spec], code: CodeType) -> str | None:
    """Return the name under which `schedule` has a method or property of this code; None: it has none."""
    for name in dir(schedule):
        thing = inspect.getattr_static(schedule, name)
        function = getattr(thing, "fget", None) or getattr(thing, "func", None) or thing
        if getattr(inspect.unwrap(function), "__code__", None) is code:
            return name
    return None


def _last_line(traceback: TracebackType | None) -> str:
    where = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_ours(code, traceback.tb_frame.f_globals):
            where = f"line {traceback.tb_lineno} of {code.co_filename}"
        traceback = traceback.tb_next
    return where


def _is_ours(code: CodeType, module: dict[str, object]) -> bool:
    """Return whether code is not the user's: that of `Spec`, or generated for dataclasses."""
    return module.get("__name__") == Spec.__module__ or code.co_filename.startswith("<")


def check_answers(spec: Spec) -> None:
    """Check a schedule's properties and methods, and every place, route and bound that it returns.

    Raises:
        ScheduleError: the text names the method, the argument it was asked with, the answer and the rule.
    """
    for name in _NUMBERS:
        value = getattr(spec, name)
        if callable(value):
            raise ScheduleError(f"{name} is a method: write @property above it")
        if not is_whole(value) or value < 1:
            raise ScheduleError(f"{name} is {value!r}: it must be a whole number, at least 1")
    for name in _FOLLOWS:
        if inspect.getattr_static(type(spec), name) is not inspect.getattr_static(Spec, name):
            raise ScheduleError(f"{name} is not for a schedule to say: it follows from place, route and after")
    if spec.order not in get_args(Order):
        raise ScheduleError(f"order is {spec.order!r}: it must be one of {', '.join(get_args(Order))}")
    for name, value in spec.parameters().items():
        _check_hashable(name, value)
    _check_spelling(type(spec))
    for name in (*_METHODS, *_BOUNDS):
        _check_callable(spec, name)
    for route in range(spec.num_routes):
        for stage in range(spec.num_stages):
            _check_place(spec, stage, route)
    if type(spec).route is not Spec.route:
        for microbatch in range(spec.total_microbatches):
            _check_route(spec, microbatch)
    if type(spec).recomputes is not Spec.recomputes:
        for stage in range(spec.num_stages):
            _check_truth(f"recomputes({stage})", spec.recomputes(stage))


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number."""
    return type(value) is int or isinstance(value, Integral)


def _check_hashable(name: str, value: object) -> None:
    try:
        hash(value)
    except TypeError:
        raise ScheduleError(f"{name} is {value!r}: a parameter must be hashable, such as a tuple") from None


def _check_spelling(schedule: type[Spec]) -> None:
    """Refuse a misspelt method or property, which would never be used."""
    asked = (*_METHODS, *_BOUNDS, *_DECLARED)
    for cls in schedule.__mro__[: schedule.__mro__.index(Spec)]:
        for name in vars(cls).keys() - dir(Spec) - cls.__annotations__.keys():
            near = [] if name.startswith("_") else difflib.get_close_matches(name, asked, n=1, cutoff=0.8)
            if near and near[0] not in vars(cls):
                raise ScheduleError(
                    f"{cls.__name__}.{name}: did you mean {near[0]}? Nobody asks a schedule for {name}; "
                    f"call it _{name} if it is a helper of yours"
                )


def _check_callable(spec: Spec, name: str) -> None:
    asked_with = list(inspect.signature(getattr(Spec, name)).parameters)[1:]
    try:
        inspect.signature(getattr(spec, name)).bind(*asked_with)
    except TypeError:
        call = f"{name}({', '.join(asked_with)})"
        raise ScheduleError(
            f"{type(spec).__name__}.{name} cannot be called as {call}, which is how it is asked"
        ) from None


def _check_place(spec: Spec, stage: int, route: int) -> None:
    at = spec.place(stage, route)
    if not is_whole(at):
        raise ScheduleError(
            f"place({stage}, {route}) returned {at!r}: it must be a worker, 0 to {spec.num_workers - 1}"
        )
    if not 0 <= at < spec.num_workers:
        raise ScheduleError(
            f"place: stage {stage} (route {route}) is on worker {at}; workers are 0 to {spec.num_workers - 1}"
        )
    if (again := spec.place(stage, route)) != at:
        raise ScheduleError(f"place({stage}, {route}) returned {at} and then {again}: it must always return the same")


def _check_route(spec: Spec, microbatch: int) -> None:
    route = spec.route(microbatch)
    if not is_whole(route) or not 0 <= route < spec.num_routes:
        raise ScheduleError(
            f"route({microbatch}) returned {route!r}: routes are 0 to {spec.num_routes - 1}, as num_routes is "
            f"{spec.num_routes}"
        )


def _check_truth(call: str, answer: object) -> None:
    if answer not in (True, False):
        raise ScheduleError(f"{call} returned {answer!r}: it must be True or False")


def bound(spec: Spec, name: str, worker: int) -> int | None:
    """Return the bound of `worker` that the method `name` returns.

    Raises:
        ScheduleError: it is neither a whole number nor None.
    """
    value: int | None = getattr(spec, name)(worker)
    if value is not None and not is_whole(value):
        raise ScheduleError(f"{name}({worker}) returned {value!r}: it must be a whole number, or None for no bound")
    return value


def slot_of(spec: Spec, action: Action) -> int:
    """Return the slot of `action`.

    Raises:
        ScheduleError: it is not a whole number.
    """
    slot = spec.slot(action)
    if not is_whole(slot):
        raise ScheduleError(f"slot({action}) returned {slot!r}: it must be a whole number")
    return slot


def actions_in(answer: object, call: str, most: int = _MOST_NAMED) -> list[Action]:
    """Return the actions that `call` returned.

    Raises:
        ScheduleError: it is no iterable of actions, or one without an end.
    """
    if isinstance(answer, Action):
        raise ScheduleError(f"{call} returned the action {answer} alone: it must be in a list, [{answer}]")
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise ScheduleError(f"{call} returned {answer!r}: it must return a list of actions, [] if there are none")
    actions = list(islice(answer, most + 1))
    if len(actions) > most:
        raise ScheduleError(f"{call} gives more than {most} actions, which are too many: it must come to an end")
    for action in actions:
        if not _is_action(action):
            kind = action.kind.letter if isinstance(action, Action) and isinstance(action.kind, Kind) else ""
            written = tuple(action) if isinstance(action, Action) else action
            shown = f"{kind}({action.stage!r}, {action.index!r})" if kind else repr(written)
            raise ScheduleError(
                f"{call} gives {shown}, which is no action: write F(stage, microbatch), both whole numbers"
            )
    return actions


def _is_action(thing: object) -> bool:
    return (
        isinstance(thing, Action)
        and isinstance(thing.kind, Kind)
        and is_whole(thing.stage)
        and is_whole(thing.microbatch)
    )


def own_actions(spec: Spec, worker: int) -> Iterator[Action]:
    """Yield the actions of `worker` by stage and microbatch, without those that end a synchronous step."""
    mixed, usual = type(spec).splits is not Spec.splits, type(spec).actions is Spec.actions
    for stage, route in spec.hosted(worker):
        for m in on_route(spec, range(spec.total_microbatches), route):
            if mixed:
                _check_truth(f"splits({stage}, {m})", spec.splits(stage, m))
            yield from spec.actions(stage, m) if usual else _answered_actions(spec, stage, m)
        if not spec.synchronous:
            yield from spec.updates(stage, route)


def _answered_actions(spec: Spec, stage: int, microbatch: int) -> list[Action]:
    """Return the actions of a microbatch on a stage, of a schedule with kinds of its own."""
    call = f"actions({stage}, {microbatch})"
    actions = actions_in(spec.actions(stage, microbatch), call)
    for action in actions:
        if action[::2] != (stage, microbatch):
            raise ScheduleError(f"{call} gives {action}: it must give what is done with that microbatch on that stage")
    kinds = {action.kind for action in actions}
    if len(kinds) < len(actions) or F not in kinds or (B in kinds) == ({I, W} <= kinds):
        shown = ", ".join(map(str, actions)) or "nothing"
        raise ScheduleError(f"{call} gives {shown}: each kind once, F among them, and either B or both I and W")
    return actions
