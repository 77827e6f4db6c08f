"""The worker's decisions: events in, instructions out."""

import random

import pytest

from rpc_pipe.dependency import B, C, D, F, G, N, Part, Pulled, Reductions, T, U, entries
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import Chimera, GPipe, OneFOneB, Varuna
from rpc_pipe.workers.state import WorkerState


def state_of(spec, worker, order="ready", before=None, **options):
    part = Part(spec, worker, entries(spec, worker, **options))
    return WorkerState(part, order, [] if before is None else [before])


def run(state, action, resource="compute"):
    """Take what must be `action`, and finish it; return whom its payload serves."""
    entry = state.take(resource)
    assert entry is not None and entry.action == action
    state.finished(action)
    return entry.consumers


def test_a_middle_worker_of_1f1b_from_start_to_end():
    """worker 1 of 3, two microbatches:   F0 F1 .. B0 B1 U, and what the last worker tells of the loss"""
    state = state_of(OneFOneB(num_workers=3, num_microbatches=2), 1)
    assert state.part.pulls == [
        Pulled(F(0, 0), 0, True),
        Pulled(F(0, 1), 0, True),
        Pulled(B(2, 0), 2, True),
        Pulled(B(2, 1), 2, True),
        Pulled(D(2, 0), 2, True),
    ]
    assert state.take() is None
    state.arrived(F(0, 0))
    assert state.take().action == F(1, 0)
    assert state.take() is None, "one action at a time"
    state.arrived(F(0, 1))
    state.finished(F(1, 0))
    assert run(state, F(1, 1)) == (2,)
    state.arrived(B(2, 0))
    assert run(state, B(1, 0)) == (0,)
    assert state.blocked() == (B(1, 1), [Pulled(B(2, 1), 2, True)])
    state.arrived(B(2, 1))
    assert run(state, B(1, 1)) == (0,)
    assert run(state, U(1, 0)) == ()
    assert state.left
    state.arrived(D(2, 0))
    assert state.take() is None, "what is told does not occupy the device"
    assert run(state, D(1, 0), "control") == (0,)
    assert not state.left


def test_a_milestone_that_is_told_after_its_action_has_ended_counts_once():
    """With a backward of no length, the simulated worker took a bucket's sum that lacked a payload."""
    spec = make_spec("1f1b", 2, 2, {"replicas": 2})
    state = state_of(spec, 0, reductions=Reductions(buckets=(2,)))
    run(state, F(0, 0))
    run(state, B(0, 0))
    for milestone in state.part.milestones[B(0, 0)]:
        state.reached(milestone)
    for _ in range(2):
        state.finished(state.take("link").action)
    assert state.take("link") is None, "its sums wait for the other replica's gradients"


def test_an_update_waits_only_for_what_is_asked_for():
    spec = OneFOneB(num_workers=1, num_microbatches=1)
    for reductions, before in (
        (Reductions(), []),
        (Reductions(weight=True), [C, D]),
        (Reductions(norms=True), [C, D, N, T]),
    ):
        state = state_of(spec, 0, reductions=reductions)
        run(state, F(0, 0))
        run(state, B(0, 0))
        for kind in before:
            assert state.take() is None
            run(state, kind(0, 0), "control")
        run(state, U(0, 0))


def test_fixed_waits_for_the_head_where_ready_goes_on():
    spec = OneFOneB(num_workers=2, num_microbatches=3, window=3)
    for order, second in (("fixed", None), ("ready", F(0, 2))):
        state = state_of(spec, 0, order=order)
        for m in (0, 1):
            run(state, F(0, m))
        entry = state.take()
        assert (entry and entry.action) == second, order  # the head is 0B0, whose gradient has not arrived


def test_what_is_ready_runs_however_long_others_wait():
    """Forwards of Varuna have no window: 64 of them may run while no gradient has come, as it is simulated.

    With a limit on how far ahead of the oldest unfinished action a worker looked, P=8, M=64 and slow links took 1899
    where the simulator said 773.
    """
    spec = Varuna(num_workers=8, num_microbatches=64)
    state = state_of(spec, 1)
    for m in range(64):
        state.arrived(F(0, m))
        run(state, F(1, m))


def test_the_next_step_begins_where_a_stage_is_updated():
    """Forwards wait for their stage's update alone, and a next update for the end of the step before."""
    spec = GPipe(num_workers=1, num_microbatches=1)
    first = state_of(spec, 0)
    run(first, F(0, 0))
    run(first, B(0, 0))
    second = state_of(spec, 0, before=first)
    assert second.take() is None
    run(first, U(0, 0))
    run(second, F(0, 0))
    run(second, B(0, 0))
    assert second.take() is None
    run(first, C(0, 0), "control")
    run(first, D(0, 0), "control")
    assert not first.left
    run(second, U(0, 0))


def test_the_end_of_a_step_does_not_wait_for_the_batch_of_the_next():
    """A worker that had begun a forward of the next step waited within it for a batch that the first worker reads.

    The first worker's loop had broken off after its step and offered no more: the job stood until `stall_s`. Seen in
    one of 300 runs of two replicas of three stages.
    """
    spec = OneFOneB(num_workers=2, num_microbatches=1)
    first = state_of(spec, 0)
    run(first, F(0, 0))
    first.arrived(B(1, 0))
    run(first, B(0, 0))
    run(first, U(0, 0))
    second = WorkerState(first.part, "ready", [first], awaits_inputs=True)
    assert second.take() is None, "its batch has not arrived"
    first.arrived(D(1, 0))
    run(first, D(0, 0), "control")
    assert not first.left
    second.inputs_arrived()
    run(second, F(0, 0))


def test_a_replica_without_a_microbatch_has_no_gradients_of_the_step_before():
    """A stream's last step of one microbatch leaves Chimera's second direction without any.

    Nothing ordered that replica's exchange behind its update, so it gave the gradients of the step before once more,
    or not, by chance: the fuzzer's run 910226 ended otherwise each time.
    """
    first = state_of(Chimera(num_workers=2, num_microbatches=2), 0)
    last = state_of(Chimera(num_workers=2, num_microbatches=1), 0, before=first)
    for pull in first.part.pulls:
        first.arrived(pull.action)
    while not first.has_finished(U(1, 1)):
        assert last.take("link") is None
        first.finished((first.take() or first.take("link")).action)
    assert last.take("link").action == G(1, 1)


@pytest.mark.parametrize("order", ["ready", "fixed"])
def test_any_timing_ends(order):
    spec = OneFOneB(num_workers=3, num_microbatches=6)
    states = [state_of(spec, w, order=order) for w in range(3)]
    rng = random.Random(0)
    asked = [(w, pull.action) for w, state in enumerate(states) for pull in state.part.pulls]
    finished, moves = set(), 0
    while any(state.left for state in states):
        for w, action in [x for x in asked if x[1] in finished]:
            asked.remove((w, action))
            states[w].arrived(action)
        w = rng.randrange(3)
        if entry := states[w].take(rng.choice(["compute", "control"])):
            states[w].finished(entry.action)
            finished.add(entry.action)
        moves += 1
        assert moves < 10_000
    assert not asked


def test_the_same_arrival_twice_is_a_bug_and_said_so():
    state = state_of(OneFOneB(num_workers=2, num_microbatches=2), 1)
    state.arrived(F(0, 0))
    with pytest.raises(AssertionError, match="0F0 arrived twice"):
        state.arrived(F(0, 0))
