"""Checks of a user's schedule: its answers, and a bound of held activations where it promises no number."""

import difflib
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import get_args

from .action import B, F, I, W
from .declared import Order
from .errors import ScheduleError
from .memory import UNSURE, WINDOW, Lives, Memory
from .program import peaks_in_order
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
                raise ScheduleError(f"place({stage}, {route}) returned {at!r}: workers are 0 to {spec.num_workers - 1}")
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
            raise ScheduleError(f"actions({stage}, {microbatch}) gives {shown}: each kind once, F, and B or I and W")


def _check_spelling(schedule: type[Spec]) -> None:
    """Refuse a misspelt method or property, which would never be used."""
    for cls in schedule.__mro__[: schedule.__mro__.index(Spec)]:
        for name in vars(cls).keys() - dir(Spec) - cls.__annotations__.keys():
            near = [] if name.startswith("_") else difflib.get_close_matches(name, _ASKED, n=1, cutoff=0.8)
            if near and near[0] not in vars(cls):
                raise ScheduleError(f"{cls.__name__}.{name}: did you mean {near[0]}? Call a helper of yours _{name}")


_NAMES_NOTHING = ". Its `after` names nothing for any action; if it tests a kind by a text, write `a.kind is F`"


def check_growth(memory: Memory, worker: int, check_runs: Callable[[Spec, Iterable[int]], None]) -> None:
    """Check that not more and more is held at some timing than in order, the more microbatches there are.

    A flush that holds everything is a choice; a bound that a late gradient removes is not.

    Args:
        check_runs: raises if a schedule cannot run.

    Raises:
        ScheduleError: nothing bounds the activations that are held.
    """
    wrong = None
    # Twice, as the first number of microbatches may be too small for a wide window.
    for _ in range(2):
        try:
            memory = memory.of_more
            check_runs(memory.spec, [worker])
            wrong = _grows(memory, worker)
        except Exception:
            break  # the schedule does not run this many
        if wrong is None:
            return
    if wrong is not None:
        raise ScheduleError(*wrong)


def _grows(memory: Memory, worker: int) -> tuple[str, str] | None:
    """Return the fault, with a drawing, if the worst timing holds far more than the worker's order does."""
    in_order = peaks_in_order(entry.action for entry in memory.program(worker))
    half, more = len(in_order) // 2, len(in_order) * 3 // 4  # at the end there may be fewer edges

    def is_bounded(lives: Lives) -> bool:
        return lives.most[more] - in_order[more] <= lives.most[half] - in_order[half]

    lives, is_exact = memory.at_any_timing(worker, is_bounded)
    if is_bounded(lives):
        return None
    from .unroll import draw_held

    spec, number = memory.spec, memory.spec.num_microbatches
    everywhere = (action for w in range(spec.num_workers) for action in spec.own_actions(w))
    idle = overrides(type(spec), "after") and not any(list(spec.after(action)) for action in everywhere)
    keeps = f"worker {worker} may keep the activations of {lives.most[-1]} forwards, of {number} microbatches"
    late = f"when gradients are late{UNSURE * (not is_exact)}, but its order keeps {in_order[-1]}"
    grows = f"nothing in the relation bounds memory, it grows with the microbatches. {WINDOW}{_NAMES_NOTHING * idle}"
    return f"{keeps}, {late}: {grows}", draw_held(lives.run_to_most(), in_order[-1])
