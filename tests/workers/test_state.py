"""The worker's decisions: events in, instructions out."""

import random

import pytest

from rpc_pipe.dependency import Action, B, F, U, entries
from rpc_pipe.schedules import GPipe, OneFOneB
from rpc_pipe.workers.state import Finished, Publish, Pull, WorkerState


def state_of(spec, worker, **options):
    options.setdefault("order", "ready")
    return WorkerState(list(entries(spec, worker)), **options)


def test_a_middle_worker_of_1f1b_from_start_to_end():
    """worker 1 of 3, two microbatches:   F0 F1 .. B0 B1 U"""
    state = state_of(OneFOneB(num_workers=3, num_microbatches=2), 1)
    assert state.start() == [
        Pull(F(0, 0), 0, True),
        Pull(F(0, 1), 0, True),
        Pull(B(2, 0), 2, True),
        Pull(B(2, 1), 2, True),
    ]
    assert state.take() is None
    assert state.arrived(F(0, 0)) == []
    assert state.take() == F(1, 0)
    assert state.take() is None, "one action at a time"
    state.arrived(F(0, 1))
    assert state.finished(F(1, 0)) == [Publish(F(1, 0), 2)]
    assert state.take() == F(1, 1)
    state.arrived(B(2, 0))
    assert state.finished(F(1, 1)) == [Publish(F(1, 1), 2)]
    assert state.take() == B(1, 0)
    assert state.finished(B(1, 0)) == [Publish(B(1, 0), 0)]
    assert state.blocked()[0] == B(1, 1)
    state.arrived(B(2, 1))
    assert state.take() == B(1, 1)
    state.finished(B(1, 1))
    assert state.take() == U(1, 0)
    assert not state.complete
    state.finished(U(1, 0))
    assert state.complete


def test_fixed_waits_for_the_head_where_ready_goes_on():
    spec = OneFOneB(num_workers=2, num_microbatches=3, window=3)
    for order, second in (("fixed", None), ("ready", F(0, 2))):
        state = state_of(spec, 0, order=order)
        state.start()
        for m in (0, 1):
            assert state.take() == F(0, m)
            state.finished(F(0, m))
        assert state.take() == second, order  # the head is 0B0, whose gradient has not arrived


def test_pulls_are_asked_only_so_far_ahead_and_several_at_once():
    state = state_of(GPipe(num_workers=2, num_microbatches=100), 1, lookahead=4)
    assert len(state.start()) == 4
    asked = []
    for m in range(3):
        state.arrived(F(0, m))
        state.take()
        asked.append([i.action.microbatch for i in state.finished(F(1, m)) if isinstance(i, Pull)])
    assert asked == [[], [4, 5], []]


@pytest.mark.parametrize("lookahead", [1, 2, 3, 64])
def test_any_lookahead_ends(lookahead):
    spec = OneFOneB(num_workers=3, num_microbatches=6)
    states = [state_of(spec, w, lookahead=lookahead) for w in range(3)]
    rng = random.Random(0)
    asked, finished, moves = [], set(), 0
    for w, state in enumerate(states):
        asked += [(w, i) for i in state.start()]
    while not all(state.complete for state in states):
        for w, pull in [x for x in asked if x[1].action in finished]:
            asked.remove((w, pull))
            states[w].arrived(pull.action)
        w = rng.randrange(3)
        if action := states[w].take():
            instructions = states[w].finished(action)
            finished.add(action)
            asked += [(w, i) for i in instructions if isinstance(i, Pull)]
        moves += 1
        assert moves < 10_000
    assert not asked


def test_the_same_arrival_twice_is_a_bug_and_said_so():
    state = state_of(OneFOneB(num_workers=2, num_microbatches=2), 1)
    state.start()
    state.arrived(F(0, 0))
    with pytest.raises(AssertionError, match="0F0 happened twice"):
        state.arrived(F(0, 0))


def test_finished_stays_small_and_right_in_any_order():
    finished = Finished()
    order = list(range(1000))
    random.Random(1).shuffle(order)
    for m in order:
        assert F(0, m) not in finished
        finished.add(F(0, m))
        assert F(0, m) in finished
    assert not finished._above[0, Action.parse("0F0").kind]
    assert B(0, 0) not in finished
