"""What is said to a schedule whose methods answer what they must not: one sentence, never a traceback of ours."""

import re
from itertools import count

import pytest
from refusals import refused
from update_always import UpdateAlways

from rpc_pipe.dependency import Action, B, F, G, I, ScheduleError, Spec, U, check, check_all
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import OneFOneB


def broken(base=OneFOneB, **methods):
    """Return 1F1B of 2 workers and 4 microbatches, or another, with these methods instead of its own."""
    return type("Mine", (base,), methods)(num_workers=2, num_microbatches=4)


def _shown(value):
    """Return a test's name without addresses of objects, which differ between processes."""
    return re.sub(r" at 0x\w+", "", str(value))[:50]


def first(action, answer, otherwise=()):
    """Return an `after` that answers something for one action."""
    return lambda self, a: answer if a == action else otherwise


AFTER = [
    (None, "after(1F1) returned None: it must return a list of actions"),
    (B(1, 0), "it must return a list of actions"),
    ("1B0", "after(1F1) returned '1B0': it must return a list of actions"),
    ([None], "after(1F1) returned [None]: it must return a list of actions"),
    ([Action(B, 1, 0)], "after(1F1) returned Action(B, 1, 0): fields are stage, kind, index"),
    ([Action(1, "B", 0)], "after(1F1) returned Action(1, 'B', 0): fields are stage, kind, index"),
    ([B(1, 0.0)], "after(1F1) returned Action(1, B, 0.0): fields are stage, kind, index"),
    ([B(1, 4)], "after(1F1) names 1B4, which does not exist: stages are 0 to 1, microbatches 0 to 3"),
    ([B(2, 0)], "after(1F1) names 2B0, which does not exist: stages are 0 to 1, microbatches 0 to 3"),
    ([B(-1, 0)], "after(1F1) names -1B0, which does not exist"),
    ([I(1, 0)], "after(1F1) names 1I0, but of microbatch 0 stage 1 runs only 1F0, 1B0"),
    ([U(1, 0)], "after(1F1) names 1U0, but U ends the step: only what is done with a microbatch may be named"),
    ([G(0, 0)], "after(1F1) names 0G0, but G ends the step: only what is done with a microbatch may be named"),
]


@pytest.mark.parametrize("slotted", [True, False], ids=["slot", "unrolled"])
@pytest.mark.parametrize("answer, says", AFTER, ids=range(len(AFTER)))
def test_what_after_must_not_answer(answer, says, slotted):
    spec = broken(OneFOneB if slotted else Spec, after=first(F(1, 1), answer))
    with refused("after", ScheduleError):
        check_all(spec)
    with refused("after", ScheduleError):
        check(spec, 1)


@pytest.mark.parametrize(
    "method, meant", [("afer", "after"), ("slots", "slot"), ("activation_limits", "activation_limit")]
)
def test_a_name_that_is_nearly_asked_for_is_refused(method, meant):
    """`def afer(self, a)` was never called, and what was said was that memory is not bounded."""
    with pytest.raises(ScheduleError, match=f"Mine.{method}: did you mean {meant}[?]"):
        check_all(broken(Spec, **{method: lambda self, a: []}))
    check_all(broken(OneFOneB, **{f"_{method}": lambda self, a: []}))


def test_a_schedule_with_an_init_of_its_own_is_told_of_parameters():
    class Mine(OneFOneB):
        def __init__(self):
            pass

    with refused("schedule"):
        make_spec(Mine, 2, 4)


def test_a_property_that_raises_is_refused_when_the_schedule_is_made():
    """`synchronous` is read before the check: `run` started workers, whose first one failed with a traceback."""
    raises = type("Mine", (OneFOneB,), {"synchronous": property(lambda self: 1 // 0)})
    with refused("Mine.<lambda>", ScheduleError):
        make_spec(raises, 2, 4)


def test_what_after_may_answer():
    def after(self, a):
        yield from [B(a.stage, a.microbatch - 2)] if a.kind is F else ()

    check_all(broken(Spec, after=after))


METHODS = [
    ({"num_stages": 0}, "num_stages is 0: it must be a whole number, at least 1"),
    ({"num_stages": 2.0}, "num_stages is 2.0: it must be a whole number"),
    ({"num_stages": lambda self: 2}, "it must be a whole number, at least 1: write @property above it"),
    ({"num_stages": property(lambda self: 2 // 0)}, "raised ZeroDivisionError: "),
    ({"num_routes": None}, "num_routes is None: it must be a whole number, at least 1"),
    ({"order": "best"}, "order is 'best': it must be one of ready, fixed"),
    ({"place": lambda self, s, r: None}, "place(0, 0) returned None: workers are 0 to 1"),
    ({"place": lambda self, s, r: s - 1}, "place(0, 0) returned -1: workers are 0 to 1"),
    ({"route": lambda self, m: 1}, "route(0) returned 1: routes are 0 to 0"),
    ({"route": lambda self, m: m - 1}, "route(0) returned -1: routes are 0 to 0"),
]


@pytest.mark.parametrize("methods, says", METHODS, ids=_shown)
def test_what_methods_must_not_answer(methods, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check_all(broken(**methods))


@pytest.mark.parametrize("name", ["place", "after", "slot", "route", "peak_activations", "order", "num_stages"])
def test_an_exception_in_a_method_names_it(name):
    def wrong(self, *asked):
        return {}["window"]

    wrong.__code__ = wrong.__code__.replace(co_name=name)
    method = property(wrong) if name in ("order", "num_stages") else wrong
    with refused(f"Mine.{name}", ScheduleError):
        check_all(broken(**{name: method}))


def test_the_user_s_own_method_is_named():
    class Deep(OneFOneB):
        def in_flight(self, stage):
            return [][stage]

    with refused("Deep.in_flight", ScheduleError):
        check_all(Deep(num_workers=2, num_microbatches=2))


def test_an_exception_while_a_schedule_is_made_names_the_line():
    class Mutable(OneFOneB):
        def __post_init__(self):
            self.ahead = 3

    with refused("Mutable.__post_init__", ScheduleError):
        make_spec(Mutable, 2, 4)


def test_parameters_must_be_hashable():
    class Windows(OneFOneB):
        windows: tuple[int, ...] = ()

    with refused("windows", ScheduleError):
        check_all(Windows(num_workers=2, num_microbatches=4, windows=[2, 1]))
    check_all(Windows(num_workers=2, num_microbatches=4, windows=(2, 1)))


PROGRAMS = [
    (None, r"program(0) returned None: it must return a list of actions"),
    ([F(0, 0), B(0, 0), U(0, 0)], "program(0) lists 0U0, but U ends the step: only what is done"),
    ([G(0, 0)], "program(0) lists 0G0, but G ends the step: only what is done"),
    ([F(0, 4)], "program(0) lists 0F4, which does not exist: stages are 0 to 1, microbatches 0 to 3"),
    ([F(0, -1)], "program(0) lists 0F-1, which does not exist"),
    ([F(-1, 0)], "program(0) lists -1F0, which does not exist"),
    ([F(2, 0)], "program(0) lists 2F0, which does not exist"),
    ([I(0, 0)], "program(0) lists 0I0, but of microbatch 0 stage 0 runs only 0F0, 0B0"),
    ([F(1, 0)], "program(0) lists 1F0, which is placed on worker 1: an action is run by exactly one worker"),
    ([F(0, 0), F(0, 0)], "program(0) lists 0F0 twice"),
    ([F(0, 0)], "program(0) does not list 0B0"),
]


@pytest.mark.parametrize(
    "methods, says",
    [
        # With a formula for slots such a schedule was trained with, and waited for the loss for ever.
        ({"actions": lambda self, s, m: []}, "actions(0, 0) gives nothing: each kind once, F, and B or I and W"),
        ({"actions": lambda self, s, m: [F(s, m), I(s, m)]}, "actions(0, 0) gives 0F0, 0I0: each kind once"),
        ({"actions": lambda self, s, m: [F(s, m), B(s, m), B(s, m)]}, "actions(0, 0) gives 0F0, 0B0, 0B0: each kind"),
    ],
    ids=["idle", "lacking", "twice"],
)
def test_what_is_run_must_be_there(methods, says):
    with refused("actions", ScheduleError):
        check_all(broken(Spec, **methods))


@pytest.mark.parametrize("listed, says", PROGRAMS, ids=_shown)
def test_what_a_program_must_not_list(listed, says):
    with refused("program", ScheduleError):
        check_all(broken(Spec, program=lambda self, worker: listed))


class Stream(UpdateAlways):
    """Two microbatches are in flight; each method may be replaced."""

    def after(self, a):
        return [B(a.stage, a.microbatch - 2), U(a.stage, a.microbatch - 3)] if a.kind is F else []

    def slot(self, a):
        base = 3 * (2 * a.microbatch + (a.stage if a.kind is F else 2 * self.num_stages - 1 - a.stage))
        return base + (a.kind is U)


@pytest.mark.parametrize(
    "methods, says",
    [
        (
            {"after": first(F(0, 3), [U(0, 9)])},
            "after(0F3) names 0U9, which does not exist: stages are 0 to 1, updates 0 to 3",
        ),
        ({"after": first(F(1, 1), [G(1, 0)])}, "after(1F1) names 1G0"),
    ],
    ids=_shown,
)
def test_updates_of_a_stream(methods, says):
    check_all(broken(Stream))
    with refused("after", ScheduleError):
        check_all(broken(Stream, **methods))


def test_a_stream_is_refused_without_a_slot():
    for methods in ({}, {"program": lambda self, worker: (F(worker, m) for m in count())}):
        spec = type("Mine", (Spec,), {"synchronous": False, **methods})(num_workers=2, num_microbatches=4)
        with refused("Mine", ScheduleError):
            check_all(spec)
