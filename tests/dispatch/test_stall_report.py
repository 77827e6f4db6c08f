"""Who waits for whom."""

from types import SimpleNamespace

import pytest

from rpc_pipe.boards.board import Live, State
from rpc_pipe.boards.stall_report import behind, duration, roll_call, running, waiting_chain
from rpc_pipe.boards.view import View
from rpc_pipe.dependency import B, F

S = 10**9


def waits(action, missing, peer, since=0):
    return Live(State.WAITING, 4, action, missing, peer, since)


def test_the_chain_of_waits_ends_at_who_waits_for_nobody():
    lives = {
        0: waits(B(0, 1), B(1, 1), 1),
        1: waits(B(1, 1), B(2, 1), 2),
        2: Live(State.RUNNING, 4, F(2, 3), since_ns=5 * S),
        3: Live(State.WAITING, 4, since_ns=1 * S),
    }
    assert waiting_chain(lives, last_host=3) == [0, 1, 2]
    assert roll_call(lives, 3, 31 * S) == [
        "worker 0 waiting for 1B1 of worker 1 to run 0B1, step 4 for 31 s",
        "worker 1 waiting for 2B1 of worker 2 to run 1B1, step 4 for 31 s",
        "worker 2 running 2F3, step 4 for 26 s",
        "worker 3 waiting for the result of step 4 for 30 s",
        "worker 0 -> worker 1 -> worker 2: everybody waits for worker 2, which is running 2F3, step 4",
    ]


def test_who_has_left_is_not_blamed_for_who_hangs():
    """The launcher was busy with what a worker printed; until it looked, those who had waited for it were leaving."""
    hangs, left = Live(State.RUNNING, 5, F(0, 1)), Live(State.LEFT, 5)
    assert waiting_chain({0: hangs, 1: left, 2: left}, last_host=2) == [0]
    assert waiting_chain({0: hangs, 1: left, 2: waits(F(2, 1), F(1, 1), 1)}, last_host=2) == [0]


def test_who_waits_for_the_result_waits_for_the_last_stage():
    lives = {0: Live(State.WAITING, 1), 1: Live(State.RUNNING, 1, F(1, 0))}
    assert waiting_chain(lives, last_host=1) == [0, 1]


def test_a_circle_is_named():
    lives = {0: waits(F(0, 1), F(1, 1), 1), 1: waits(F(1, 1), F(0, 1), 0)}
    assert roll_call(lives, 1, S)[-1] == (
        "worker 1 -> worker 0 -> worker 1: each waits for the other: a message was lost, or the machine is overloaded"
    )


def test_who_waits_for_a_worker_that_cannot_be_seen_is_the_end():
    """Of a worker that hung while it made its model it was said that a message had been lost."""
    lives = {0: waits(B(0, 1), B(1, 1), 1), 1: waits(F(1, 1), F(2, 1), 2)}
    assert waiting_chain(lives, last_host=2) == [0, 1]
    for seen, names in ((lives, "worker 0 -> worker 1"), ({1: lives[1]}, "worker 1")):
        assert roll_call(seen, 2, S)[-1].startswith(
            f"{names} -> worker 2: everybody waits for worker 2, of which nothing can be seen here"
        )


def test_durations_are_told_as_readers_want_them():
    assert [duration(s * S) for s in (0.02, 3.14, 31, 600)] == ["20 ms", "3.1 s", "31 s", "10 min"]


def test_the_member_that_is_behind_is_blamed():
    """Its peer had begun the backward after the forward in which it hung, and was blamed."""
    waiting = waits(B(0, 1), B(1, 1), 1)
    hangs, further = Live(State.RUNNING, 4, F(1, 3), since_ns=5 * S), Live(State.RUNNING, 4, B(1, 3), since_ns=6 * S)
    lives = {0: waiting, 1: waiting, 2: hangs, 3: further}
    assert behind(lives, 3, members=2) == behind(lives, 2, members=2) == 2
    assert behind(lives, 3, members=1) == 3


def test_the_member_that_is_in_no_action_is_blamed_and_processes_are_named():
    """The member that waited in a collective was said to hang; the list called processes workers, by their numbers."""
    waiting, gathers = waits(B(0, 1), B(1, 1), 3), Live(State.RUNNING, 5, F(1, 0), since_ns=1 * S)
    for state, step in ((State.BETWEEN, 4), (State.STOPPED, 4), (State.STOPPED, 5)):
        lives = {0: waiting, 1: waiting, 2: Live(state, step, since_ns=2 * S), 3: gathers}
        assert behind(lives, 3, members=2) == behind(lives, 2, members=2) == 2
        *lines, chain = roll_call(lives, 3, 9 * S, members=2)
        assert "process 3 (member 1 of worker 1)" in lines[0] and "everybody waits for process 2 (member 0" in chain
    lives[2] = Live(State.BETWEEN, 5)
    assert behind(lives, 3, members=2) == 3, "it has ended the step in which the other one is"


@pytest.mark.parametrize(
    "innermost",
    ["torch/distributed/distributed_c10d.py", "torch/_ops.py"],
)
def test_of_members_in_one_action_the_one_outside_of_collectives_hangs(innermost):
    """Both members ran 0F0; the one that waited for the other in a gather had begun it first, and was blamed."""
    hangs, gathers = Live(State.RUNNING, 4, F(0, 0), since_ns=6 * S), Live(State.RUNNING, 4, F(0, 0), since_ns=5 * S)
    lives = {0: hangs, 1: gathers, 2: waits(F(1, 0), F(0, 0), 0), 3: waits(F(1, 0), F(0, 0), 1)}
    assert running(lives) == [1, 0] and behind(lives, 2, members=2) == 2
    stacks = {
        0: ["stacks of worker 0", '  File "/train.py", line 3 in forward', '  File "/torch/nn/modules/module.py"'],
        1: [f'  File "/{innermost}"', '  File "/torch/distributed/_functional_collectives.py", line 8', "  File x"],
        2: [],
    }

    def found(culprit, members, lives):
        view = SimpleNamespace(culprit=lambda: culprit, _stall=(lives, 0, members))
        return View.hanging(view, SimpleNamespace(stacks=stacks.get))

    assert found(1, 2, lives) == (0, stacks[0])
    assert found(1, 1, lives) == (1, stacks[1]), "without members a process in a collective is as good"
    assert found(2, 2, {1: gathers}) == (2, stacks[2]), "all that run are in collectives"
