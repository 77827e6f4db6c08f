"""Checks of the answers of a user's schedule."""

from __future__ import annotations

import difflib
from numbers import Integral
from typing import get_args

from .action import B, F, I, W
from .declared import Order
from .errors import ScheduleError
from .spec import Spec, overrides

#: properties of a schedule that are numbers, and the other allowed values
_NUMBERS = ("num_workers", "num_microbatches", "num_stages", "num_routes")
_ASKED = (
    *("place", "route", "splits", "recomputes", "after", "slot", "program", "version", "order", "synchronous"),
    *("activation_limit", "peak_activations", "split_backward", "recompute", "update_every", *_NUMBERS),
    *("actions", "origin", "successors", "moved", "peak_weights"),
)


def check_answers(spec: Spec) -> None:
    """Check a schedule's numbers, the names of its methods, and where it puts stages and microbatches.

    Raises:
        ScheduleError: the text names the method, the argument it was asked with, the answer and the rule.
    """
    for name in _NUMBERS:
        value = getattr(spec, name)
        if not isinstance(value, Integral) or value < 1:
            hint = ": write @property above it" if callable(value) else ""
            raise ScheduleError(f"{name} is {value!r}: it must be a whole number, at least 1{hint}")
    if spec.order not in get_args(Order):
        raise ScheduleError(f"order is {spec.order!r}: it must be one of {', '.join(get_args(Order))}")
    for name, value in spec.parameters().items():
        try:
            hash(value)
        except TypeError:
            raise ScheduleError(f"{name} is {value!r}: a parameter must be hashable, such as a tuple") from None
    _check_spelling(type(spec))
    for route in range(spec.num_routes):
        for stage in range(spec.num_stages):
            at = spec.place(stage, route)
            if not isinstance(at, Integral) or at not in (spec.numbers or range(spec.num_workers)):
                raise ScheduleError(
                    f"place({stage}, {route}) returned {at!r}: it must be a worker, 0 to {spec.num_workers - 1}"
                )
    for microbatch in range(spec.total_microbatches):
        found = spec.route(microbatch)
        if not isinstance(found, Integral) or not 0 <= found < spec.num_routes:
            raise ScheduleError(f"route({microbatch}) returned {found!r}: routes are 0 to {spec.num_routes - 1}")
        for stage in range(spec.num_stages):
            _check_actions(spec, stage, microbatch)


def _check_actions(spec: Spec, stage: int, microbatch: int) -> None:
    """Check the actions of a microbatch on a stage, for a schedule that adds kinds."""
    if overrides(type(spec), "actions"):
        actions = spec.actions(stage, microbatch)
        kinds = {action.kind for action in actions}
        if len(kinds) < len(actions) or F not in kinds or (B in kinds) == ({I, W} <= kinds):
            shown = ", ".join(map(str, actions)) or "nothing"
            raise ScheduleError(
                f"actions({stage}, {microbatch}) gives {shown}: each kind once, F among them, and either B or both I "
                "and W"
            )


def _check_spelling(schedule: type[Spec]) -> None:
    """Refuse a misspelt method or property, which would never be used."""
    for cls in schedule.__mro__[: schedule.__mro__.index(Spec)]:
        for name in vars(cls).keys() - dir(Spec) - cls.__annotations__.keys():
            near = [] if name.startswith("_") else difflib.get_close_matches(name, _ASKED, n=1, cutoff=0.8)
            if near and near[0] not in vars(cls):
                raise ScheduleError(
                    f"{cls.__name__}.{name}: did you mean {near[0]}? Nobody asks a schedule for {name}; "
                    f"call it _{name} if it is a helper of yours"
                )
