"""What the checker says to schedules that cannot run."""

import time
import tracemalloc
from dataclasses import replace
from itertools import islice

import pytest
from refusals import refused
from update_always import UpdateAlways

from rpc_pipe.dependency import B, F, I, ScheduleError, Spec, U, W, check, check_all, entries
from rpc_pipe.schedules import OneFOneB


class TooEager(OneFOneB):
    """Names a microbatch of the previous stage that comes later."""

    def after(self, a):
        return [F(a.stage - 1, a.microbatch + 1)] if a.kind is F and a.stage and a.microbatch < 2 else []


class Circle(Spec):
    """No slot: the cycle is found by unrolling."""

    def after(self, a):
        return [B(a.stage, a.microbatch)] if a.kind is F and a.stage == 1 else []


class FarAway(OneFOneB):
    def after(self, a):
        return [F(0, a.microbatch)] if a.kind is F and a.stage == 3 else []


class SameSlot(Spec):
    def slot(self, a):
        return a.stage if a.kind is F else 2 * self.num_stages - 1 - a.stage


class Forgetful(OneFOneB):
    """Claims less memory than its order needs."""

    def peak_activations(self, worker):
        return 2


class Listed(Spec):
    """A program; the parameter breaks it."""

    mistake: str = ""

    def program(self, worker):
        listed = [kind(worker, m) for m in range(self.num_microbatches) for kind in (F, B)]
        if self.mistake == "doubly placed" and worker == 1:
            listed.append(F(0, 0))
        if self.mistake == "twice" and worker == 1:
            listed.append(F(1, 0))
        if self.mistake == "missing" and worker == 1:
            del listed[0]
        if self.mistake == "order" and worker == 1:
            listed.reverse()
        return listed


@pytest.mark.parametrize(
    "spec, message, drawing",
    [
        (TooEager, "1F0", "[0F1]"),
        (Circle, "cycle", "the circle closes"),
        (FarAway, "after", "0F0"),
        (SameSlot, "slot", ""),
        (Forgetful, "worker", ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refuses(spec, message, drawing):
    with refused(message, ScheduleError) as refusal:
        check_all(spec(num_workers=4, num_microbatches=4))
    assert drawing in refusal.value.drawing


class Unbounded(OneFOneB):
    """The slots of 1F1B without its window: in order it holds 4, with a late gradient everything."""

    claim: int | None = None

    def after(self, a):
        return []

    def peak_activations(self, worker):
        return self.claim


@pytest.mark.parametrize("claim", [None, 4])
def test_memory_that_only_luck_bounds_is_refused(claim):
    with refused("worker", ScheduleError) as refusal:
        check_all(Unbounded(num_workers=4, num_microbatches=8, claim=claim))
    assert refusal.value.drawing.splitlines() == [
        "runs    0F0  0F1  0F2  0F3  0F4",
        "holds     1    2    3    4    5",
        "0F4 is one too many: allowed are 4",
    ]


def test_a_bound_that_holds_only_through_other_workers_is_seen():
    class OneAtATime(Spec):
        """Naive: the window is on the first stage alone."""

        def after(self, a):
            return [B(0, a.microbatch - 1)] if a.kind is F and a.stage == 0 else []

        def slot(self, a):
            turn = a.stage if a.kind is F else 2 * self.num_stages - 1 - a.stage
            return 2 * self.num_stages * a.microbatch + turn

        def peak_activations(self, worker):
            return 1

    check_all(OneAtATime(num_workers=4, num_microbatches=50))


def test_an_activation_limit_below_the_order_is_refused():
    class Tight(Listed):
        def program(self, worker):
            return [*(F(worker, m) for m in range(3)), *(B(worker, m) for m in range(3))]

        def activation_limit(self, worker):
            return 2

    with refused("activation_limit", ScheduleError):
        check_all(Tight(num_workers=2, num_microbatches=3))


@pytest.mark.parametrize(
    "mistake, message, drawing",
    [
        (
            "doubly placed",
            "program",
            "worker 0  [0F0] 0B0 0F1 0B1\nworker 1  1F0 1B0 1F1 1B1 [0F0]",
        ),
        ("twice", "program", "worker 1  [1F0] 1B0 1F1 1B1 [1F0]"),
        ("missing", "program", "worker 1  1B0 1F1 1B1"),
        ("order", "cycle", "the circle closes"),
    ],
)
def test_refuses_programs(mistake, message, drawing):
    with refused(message, ScheduleError) as refusal:
        check_all(Listed(num_workers=2, num_microbatches=2, mistake=mistake))
    assert drawing in refusal.value.drawing
    check_all(Listed(num_workers=2, num_microbatches=2))


def test_the_drawing_shows_both_ends_of_the_edge():
    with pytest.raises(ScheduleError) as refusal:
        check_all(TooEager(num_workers=3, num_microbatches=3))
    assert refusal.value.drawing.splitlines() == [
        "slot         1    2",
        "worker 0     .[0F1]",
        "worker 1 [1F0]    .",
        "1F0 waits for 0F1, so the slot of 0F1 must be the smaller one",
    ]


def test_a_spec_without_slot_runs_in_a_greedy_order():
    class OnlyTheRelation(Spec):
        def after(self, a):
            return [B(a.stage, a.microbatch - (self.num_stages - a.stage))] if a.kind is F else []

    spec = OnlyTheRelation(num_workers=3, num_microbatches=4)
    check_all(spec)
    assert [str(e.action) for e in entries(spec, 0)] == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U0 0D0".split()
    assert [str(e.action) for e in entries(spec, 2)] == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U0 2C0 2D0".split()


def test_one_worker_of_a_huge_run_checks_itself_quickly():
    """The bar is 1 s and 200 MB; other workers' actions must not be enumerated."""
    spec = OneFOneB(num_workers=1024, num_microbatches=8192)
    begin = time.process_time()
    check(spec, 500)
    assert time.process_time() - begin < 3  # generous: the machine may be shared
    fewer = replace(spec, num_microbatches=2048)  # tracing makes it four times as slow
    tracemalloc.start()
    check(fewer, 500)
    program = list(entries(fewer, 500))
    assert tracemalloc.get_traced_memory()[1] < 25e6
    tracemalloc.stop()
    assert len(program) == 2 * 2048 + 2, "an update, and what is told of the loss"


def test_gradients_are_summed_in_slot_order_by_an_edge():
    spec = OneFOneB(num_workers=2, num_microbatches=3)
    own = {str(e.action): {str(need) for need in e.own} for e in entries(spec, 1)}
    assert own["1B2"] == {"1F2", "1B1"}


class TwoRoutes(Spec):
    """Chimera's placement: even microbatches go down the workers, odd ones up; two replicas of each stage."""

    num_routes = 2

    def place(self, stage, route):
        return stage if route == 0 else self.num_workers - 1 - stage

    def after(self, a):
        return [B(a.stage, a.microbatch - 2)] if a.kind is F else []


class SplitV(Spec):
    """Two stages a worker in a V, backward split in two."""

    split_backward = True

    @property
    def num_stages(self):
        return 2 * self.num_workers

    def place(self, stage, route):
        return min(stage, self.num_stages - 1 - stage)

    def after(self, a):
        return [W(a.stage, a.microbatch - 2)] if a.kind is F else []


def test_two_routes_over_the_same_workers():
    spec = TwoRoutes(num_workers=4, num_microbatches=4)
    check_all(spec)
    assert spec.hosted(0) == [(0, 0), (3, 1)]
    actions = [str(e.action) for e in entries(spec, 0)]
    assert sorted(actions) == sorted("0F0 0F2 0B0 0B2 3F1 3F3 3B1 3B3 0G2 3G1 0S0 3S3 0U0 3U1 0C0 0D0".split())


def test_a_v_with_split_backward_hands_over_without_a_message():
    spec = SplitV(num_workers=2, num_microbatches=2)
    check_all(spec)
    entry = {str(e.action): e for e in entries(spec, 1)}
    assert entry["2F0"].pulled == () and F(1, 0) in entry["2F0"].own
    assert entry["1F0"].consumers == ()
    assert [p.action for p in entry["1F0"].pulled] == [F(0, 0)]
    assert I(1, 0) in entry["1W0"].own
    assert entry["1U0"].own == (W(1, 1),) and W(1, 0) in entry["1W1"].own, "a chain, whose end stands for all"


class Stream(UpdateAlways):
    """PipeDream: forwards may run ahead of updates; never flushed."""

    def after(self, a):
        return [B(a.stage, a.microbatch - (self.num_stages - a.stage))] if a.kind is F else []

    def slot(self, a):
        base = 3 * (2 * a.microbatch + (a.stage if a.kind is F else 2 * self.num_stages - 1 - a.stage))
        return base + (a.kind is U)


def test_updates_stand_where_slots_say():
    spec = Stream(num_workers=2, num_microbatches=4)
    check_all(spec)
    first = [str(e.action) for e in islice(entries(spec, 0), 9)]
    assert first == "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2".split()
