"""What is said to a schedule whose methods answer what they must not: one sentence, never a traceback of ours."""

import re
import sys
from itertools import count

import pytest
from update_always import UpdateAlways

from rpc_pipe.dependency import Action, B, ConfigError, F, G, I, ScheduleError, Spec, U, check, check_all
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
    (None, r"after(1F1) returned None: it must return a list of actions, [] if there are none"),
    (B(1, 0), "after(1F1) returned the action 1B0 alone: it must be in a list, [1B0]"),
    ("1B0", "after(1F1) returned '1B0': it must return a list of actions, [] if there are none"),
    (3, "after(1F1) returned 3: it must return a list of actions, [] if there are none"),
    (["1B0"], "after(1F1) gives '1B0', which is no action: write F(stage, microbatch), both whole numbers"),
    ([(1, B, 0)], "after(1F1) gives (1, B, 0), which is no action"),
    ([None], "after(1F1) gives None, which is no action"),
    ([B(1, 0.5)], "after(1F1) gives B(1, 0.5), which is no action"),
    ([B(1.0, 0)], "after(1F1) gives B(1.0, 0), which is no action"),
    ([Action(1, "B", 0)], "after(1F1) gives (1, 'B', 0), which is no action"),
    ([B(1, 4)], "after(1F1) names 1B4, which does not exist: stages are 0 to 1, microbatches 0 to 3"),
    ([B(2, 0)], "after(1F1) names 2B0, which does not exist: stages are 0 to 1, microbatches 0 to 3"),
    ([B(-1, 0)], "after(1F1) names -1B0, which does not exist"),
    ([I(1, 0)], "after(1F1) names 1I0, but of microbatch 0 stage 1 runs only the kinds F, B"),
    ([U(1, 0)], "after(1F1) names 1U0, but U ends the step: only what is done with a microbatch may be named"),
    ([G(0, 0)], "after(1F1) names 0G0, but G ends the step: only what is done with a microbatch may be named"),
]


@pytest.mark.parametrize("slotted", [True, False], ids=["slot", "unrolled"])
@pytest.mark.parametrize("answer, says", AFTER, ids=range(len(AFTER)))
def test_what_after_must_not_answer(answer, says, slotted):
    spec = broken(OneFOneB if slotted else Spec, after=first(F(1, 1), answer))
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check_all(spec)
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check(spec, 1)


@pytest.mark.parametrize("slotted", [True, False], ids=["slot", "unrolled"])
def test_an_answer_that_depends_on_who_asks_is_refused(slotted):
    """Drawn at random, a window was another one on every worker: simulated without a word, and in a run all waited."""
    number = count(1)
    spec = broken(OneFOneB if slotted else Spec, after=lambda self, a: [B(a.stage, a.microbatch - next(number))])
    with pytest.raises(ScheduleError, match=r"after\(0F0\) gives \[0B-1\] and, asked again, \[0B-2\]: every worker"):
        check_all(spec)


@pytest.mark.parametrize(
    "method, meant", [("afer", "after"), ("slots", "slot"), ("activation_limits", "activation_limit")]
)
def test_a_name_that_is_nearly_asked_for_is_refused(method, meant):
    """`def afer(self, a)` was never called, and what was said was that memory is not bounded."""
    with pytest.raises(ScheduleError, match=f"Mine.{method}: did you mean {meant}[?] Nobody asks a schedule for"):
        check_all(broken(Spec, **{method: lambda self, a: []}))
    check_all(broken(OneFOneB, **{f"_{method}": lambda self, a: []}))


def test_a_schedule_with_an_init_of_its_own_is_told_of_parameters():
    class Mine(OneFOneB):
        def __init__(self):
            pass

    with pytest.raises(ConfigError, match="Mine must not define __init__; a parameter is an attribute with a type"):
        make_spec(Mine, 2, 4)


def test_what_after_may_answer():
    def after(self, a):
        yield from [B(a.stage, a.microbatch - 2)] if a.kind is F else ()

    check_all(broken(Spec, after=after))


METHODS = [
    ({"num_stages": 0}, "num_stages is 0: it must be a whole number, at least 1"),
    ({"num_stages": -1}, "num_stages is -1: it must be a whole number, at least 1"),
    ({"num_stages": 2.0}, "num_stages is 2.0: it must be a whole number"),
    ({"num_stages": lambda self: 2}, "num_stages is a method: write @property above it"),
    ({"num_stages": property(lambda self: 2 // 0)}, "num_stages raised ZeroDivisionError: "),
    ({"num_routes": 0}, "num_routes is 0: it must be a whole number, at least 1"),
    ({"num_routes": None}, "num_routes is None: it must be a whole number, at least 1"),
    ({"order": "best"}, "order is 'best': it must be one of ready, fixed"),
    ({"place": lambda self, s, r: None}, "place(0, 0) returned None: it must be a worker, 0 to 1"),
    ({"place": lambda self, s, r: s / 1}, "place(0, 0) returned 0.0: it must be a worker, 0 to 1"),
    ({"place": lambda self, s, r: s - 1}, "place: stage 0 (route 0) is on worker -1; workers are 0 to 1"),
    ({"place": lambda self, s: s}, "Mine.place cannot be called as place(stage, route), which is how it is asked"),
    ({"after": lambda self: []}, "Mine.after cannot be called as after(action)"),
    ({"slot": 3}, "Mine.slot cannot be called as slot(action)"),
    ({"route": lambda self, m: 1}, "route(0) returned 1: routes are 0 to 0, as num_routes is 1"),
    ({"route": lambda self, m: m - 1}, "route(0) returned -1: routes are 0 to 0"),
    ({"route": lambda self, m: None}, "route(0) returned None: routes are 0 to 0"),
    ({"splits": lambda self, s, m: None}, "splits(0, 0) returned None: it must be True or False"),
    ({"recomputes": lambda self, s: "no"}, "recomputes(0) returned 'no': it must be True or False"),
    ({"slot": lambda self, a: None}, "slot(0F0) returned None: it must be a whole number"),
    ({"slot": lambda self, a: a.microbatch / 2}, "slot(0F0) returned 0.0: it must be a whole number"),
    ({"peak_activations": lambda self, w: "2"}, "peak_activations(0) returned '2': it must be a whole number, or None"),
    ({"activation_limit": lambda self, w: 2.5}, "activation_limit(0) returned 2.5: it must be a whole number, or None"),
    ({"updates": lambda self, s, r: []}, "updates is not for a schedule to say"),
]


@pytest.mark.parametrize("methods, says", METHODS, ids=_shown)
def test_what_methods_must_not_answer(methods, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check_all(broken(**methods))


@pytest.mark.parametrize(
    "name, says",
    {
        "place": "place(0, 0)",
        "after": "after(0F0)",
        "slot": "slot(0F0)",
        "route": "route(0)",
        "splits": "splits(0, 0)",
        "recomputes": "recomputes(0)",
        "peak_activations": "peak_activations(0)",
        "activation_limit": "activation_limit(0)",
        "order": "order",
        "num_stages": "num_stages",
        "num_routes": "num_routes",
    }.items(),
)
def test_an_exception_in_a_method_names_the_call(name, says):
    def wrong(self, *asked):
        return {}["window"]

    method = property(wrong) if name in ("order", "num_stages", "num_routes") else wrong
    with pytest.raises(ScheduleError, match=re.escape(f"{says} raised KeyError: 'window' (line ")):
        check_all(broken(**{name: method}))


def test_the_outermost_call_is_blamed_not_what_it_calls():
    class Deep(OneFOneB):
        def in_flight(self, stage):
            return [][stage]

    with pytest.raises(ScheduleError, match=r"^after\(0F0\) raised IndexError: .*test_answers.py\)$"):
        check_all(Deep(num_workers=2, num_microbatches=2))


def test_an_exception_while_a_schedule_is_made_names_the_line():
    class Mutable(OneFOneB):
        def __post_init__(self):
            self.ahead = 3

    with pytest.raises(ScheduleError, match=r"^__post_init__\(\) raised FrozenInstanceError: .*test_answers.py\)$"):
        make_spec(Mutable, 2, 4)


def test_an_error_of_our_own_is_not_blamed_on_the_schedule(monkeypatch):
    monkeypatch.setattr(sys.modules[check.__module__], "entries", lambda spec, worker: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        check_all(OneFOneB(num_workers=2, num_microbatches=2))


def test_parameters_must_be_hashable():
    class Windows(OneFOneB):
        windows: tuple[int, ...] = ()

    with pytest.raises(ScheduleError, match=r"windows is \[2, 1\]: a parameter must be hashable, such as a tuple"):
        check_all(Windows(num_workers=2, num_microbatches=4, windows=[2, 1]))
    check_all(Windows(num_workers=2, num_microbatches=4, windows=(2, 1)))


PROGRAMS = [
    (None, r"program(0) returned None: it must return a list of actions, [] if there are none"),
    ([F(0, 0), "0B0"], "program(0) gives '0B0', which is no action"),
    ([F(0, 0), B(0, 0), U(0, 0)], "program(0) lists 0U0, but U ends the step by itself"),
    ([G(0, 0)], "program(0) lists 0G0, but G ends the step by itself"),
    ([F(0, 4)], "program(0) lists 0F4, which does not exist: stages are 0 to 1, microbatches 0 to 3"),
    ([F(0, -1)], "program(0) lists 0F-1, which does not exist"),
    ([F(-1, 0)], "program(0) lists -1F0, which does not exist"),
    ([F(2, 0)], "program(0) lists 2F0, which does not exist"),
    ([I(0, 0)], "program(0) lists 0I0, but of microbatch 0 stage 0 runs only 0F0, 0B0"),
    ([F(1, 0)], "program(0) lists 1F0, which is placed on worker 1: an action is run by exactly one worker"),
    ([F(0, 0), F(0, 0)], "program(0) lists 0F0 twice"),
    ([F(0, 0)], "program(0) does not list 0B0"),
]


ANSWERS = count()


def leave(self, action):
    sys.exit(3)


@pytest.mark.parametrize(
    "methods, says",
    [
        ({"actions": lambda self, s, m: None}, "actions(0, 0) returned None: it must return a list of actions"),
        # With a formula for slots such a schedule was trained with, and waited for the loss for ever.
        ({"actions": lambda self, s, m: []}, "actions(0, 0) gives nothing: each kind once, F among them, and either B"),
        ({"actions": lambda self, s, m: [F(s, m), I(s, m)]}, "actions(0, 0) gives 0F0, 0I0: each kind once"),
        ({"actions": lambda self, s, m: [F(s, m), B(s, m), B(s, m)]}, "actions(0, 0) gives 0F0, 0B0, 0B0: each kind"),
        ({"actions": lambda self, s, m: [F(s, 1), B(s, 1)]}, "actions(0, 0) gives 0F1: it must give what is done with"),
        (
            {"place": lambda self, s, r: next(ANSWERS) % 2},
            "place(0, 0) returned 0 and then 1: it must always",
        ),
        ({"after": leave}, "after(0F0) raised SystemExit: 3 (line "),
    ],
    ids=["none", "idle", "lacking", "twice", "elsewhere", "random", "exit"],
)
def test_what_is_run_must_be_there(methods, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check_all(broken(Spec, **methods))


@pytest.mark.parametrize(
    "methods, says",
    [
        ({"after": lambda self, a: (B(a.stage, 0) for _ in count())}, "after(0F0) gives more than 1000000 actions"),
        ({"program": lambda self, w: (F(w, 0) for _ in count())}, "program(0) gives more than 64 actions"),
    ],
    ids=["after", "program"],
)
def test_an_answer_without_an_end_is_refused(methods, says):
    """The checker never came back."""
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check_all(broken(Spec, **methods))


@pytest.mark.parametrize("listed, says", PROGRAMS, ids=_shown)
def test_what_a_program_must_not_list(listed, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
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
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check_all(broken(Stream, **methods))


def test_a_stream_is_refused_without_a_slot():
    for methods in ({}, {"program": lambda self, worker: (F(worker, m) for m in count())}):
        spec = type("Mine", (Spec,), {"synchronous": False, **methods})(num_workers=2, num_microbatches=4)
        with pytest.raises(ScheduleError, match="Mine: a schedule that is not synchronous needs `slot`"):
            check_all(spec)
