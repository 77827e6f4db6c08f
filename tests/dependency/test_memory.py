"""What a worker may hold at the worst timing: against the definition, and the stories of what was judged wrongly."""

from dataclasses import replace

import pytest
from antichain import most_held
from random_specs import random_spec
from refusals import refused

from rpc_pipe.dependency import (
    B,
    ConfigError,
    F,
    PipeError,
    ScheduleError,
    Spec,
    check,
    check_all,
)
from rpc_pipe.dependency.memory import Memory
from rpc_pipe.schedules import OneFOneB


def lives_of(spec):
    memory = Memory(spec)
    return [memory.at_any_timing(worker, lambda lives: False) for worker in range(spec.num_workers)]


@pytest.mark.parametrize("block", range(4))
def test_the_bound_is_the_largest_set_of_lives_that_may_overlap(block):
    compared = 0
    for seed in range(40 * block, 40 * (block + 1)):
        spec = random_spec(seed)
        try:
            check_all(replace(spec, claims=(10**6,) * spec.num_workers))
        except ScheduleError:
            continue  # it cannot be run
        truth = most_held(spec)
        for (lives, is_exact), most in zip(lives_of(spec), truth, strict=True):
            assert is_exact and lives.most[-1] == most
            assert sum(action.kind.holds for action in lives.run_to_most()) == most
        compared += 1
        check_all(replace(spec, claims=tuple(truth)))
        with refused("worker", ScheduleError):
            check_all(replace(spec, claims=tuple(most - 1 for most in truth)))
    assert compared > 20


class Turns(Spec):
    """One microbatch at a time, by a window on one stage, which may be far away; it may end after some microbatches."""

    on: int = 0
    last: int = 2**60
    claim: int | None = 1

    def after(self, a):
        return [B(a.stage, a.microbatch - 1)] if a.kind is F and a.stage == self.on and a.microbatch < self.last else []

    def slot(self, a):
        turn = a.stage if a.kind is F else 2 * self.num_stages - 1 - a.stage
        return 2 * self.num_stages * a.microbatch + turn

    def peak_activations(self, worker):
        return self.claim


def test_a_window_on_another_stage_is_seen_where_the_relation_is_small_enough_to_be_looked_at():
    check(Turns(num_workers=12, num_microbatches=32, on=8), 10)
    with refused("worker", ScheduleError):
        check(Turns(num_workers=1024, num_microbatches=512, on=300), 700)


def test_a_window_that_ends_is_not_believed_because_it_began():
    """What the first microbatches did was taken for what all do."""
    with refused("worker", ScheduleError):
        check(Turns(num_workers=2, num_microbatches=9, last=5), 1)


def test_a_window_through_the_end_of_another_stage_is_seen():
    """The forward of stage 1 names a backward of stage 0, which needs that of stage 1: a true claim was refused."""

    class Folded(Spec):
        num_stages = 2

        def after(self, a):
            return [B(0, a.microbatch - 1)] if a.kind is F else []

        def peak_activations(self, worker):
            return 2

    check_all(Folded(num_workers=1, num_microbatches=20))


def test_what_grows_by_half_of_the_microbatches_grows():
    """Every other forward has a window. Not everything is held, so it was believed to be bounded."""

    class EveryOther(OneFOneB):
        def after(self, a):
            return super().after(a) if a.microbatch % 2 else []

        def peak_activations(self, worker):
            return None

    with refused("worker", ScheduleError):
        check_all(EveryOther(num_workers=4, num_microbatches=9))


def test_a_flush_that_holds_everything_is_a_choice():
    class Flush(Spec):
        def after(self, a):
            return [F(a.stage, self.num_microbatches - 1)] if a.kind is B else []

    check_all(Flush(num_workers=3, num_microbatches=5))


@pytest.mark.parametrize("window", [5, 40, 120])
def test_a_wide_window_is_a_window(window):
    class Wide(Spec):
        def after(self, a):
            return [B(a.stage, a.microbatch - window)] if a.kind is F else []

    check_all(Wide(num_workers=3, num_microbatches=5))


class Tables(Spec):
    """Made for up to 8 microbatches: with more it cannot be made, has a circle, or runs out of its table."""

    trouble: str

    def __post_init__(self):
        if self.trouble == "number" and self.num_microbatches > 8:
            raise ConfigError("at most 8 microbatches")

    def after(self, a):
        if a.kind is not F:
            return []
        window = range(8)[a.microbatch] - 4 if self.trouble == "table" else a.microbatch - 4
        return [B(a.stage, a.microbatch if self.trouble == "circle" and a.microbatch > 20 else window)]


@pytest.mark.parametrize("trouble", ["number", "circle", "table"])
def test_trouble_with_more_microbatches_than_were_asked_for_is_none(trouble):
    """The checker looks at more of them to see what grows."""
    check_all(Tables(num_workers=2, num_microbatches=8, trouble=trouble))
    with pytest.raises(PipeError):
        check_all(Tables(num_workers=2, num_microbatches=32, trouble=trouble))
