import pytest
import torch

from rpc_pipe.dependency import PipeError, WorkerFailure
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.outbox import Outbox
from rpc_pipe.workers.transport.payload import pack

PAYLOAD = pack(torch.ones(2))
KEY = (1, "0F0")
CALL = Call(0, "step 0")


def test_asked_before_or_after_it_is_there():
    outbox, answers = Outbox(), []
    outbox.ask(KEY, 1, answers.append)
    assert answers == []
    outbox.promise(KEY, [1, 2])
    assert answers == [] and len(outbox) == 1
    outbox.put(KEY, PAYLOAD, [1, 2])
    outbox.ask(KEY, 2, answers.append)
    assert answers == [PAYLOAD, PAYLOAD]


def test_kept_until_every_consumer_has_it_and_given_again_to_who_asks_again():
    outbox, answers = Outbox(), []
    outbox.put(KEY, PAYLOAD, [1, 2])
    outbox.ask(KEY, 1, lambda answer: None)  # lost on the way
    outbox.ask(KEY, 1, answers.append)
    assert answers == [PAYLOAD]
    outbox.taken([KEY], 1)
    outbox.taken([KEY], 1)
    assert len(outbox) == 1
    outbox.taken([KEY], 2)
    outbox.wait_taken(before=2, timeout_s=0)
    assert len(outbox) == 0


def test_who_left_after_the_promise_is_not_waited_for():
    """Read again, not met: on a GPU a payload is on its way for a while, and an offer forgot who had left meanwhile."""
    outbox = Outbox()
    outbox.promise(KEY, [1, 2])
    outbox.leaves(1)
    outbox.put(KEY, PAYLOAD, [1, 2])
    assert outbox.waiting() == {2}
    outbox.taken([KEY], 2)
    assert len(outbox) == 0


def test_asking_again_replaces_the_question():
    outbox, first, second = Outbox(), [], []
    outbox.ask(KEY, 1, first.append)
    outbox.ask(KEY, 1, second.append)
    outbox.put(KEY, PAYLOAD, [1])
    assert (first, second) == ([], [PAYLOAD])


def test_that_it_is_finished_is_an_answer_without_payload():
    outbox, answers = Outbox(), []
    outbox.begin(CALL)
    outbox.ask((1, "0F0 done"), 1, answers.append)
    assert answers == []
    outbox.finish((1, "0F0 done"))
    outbox.ask((1, "0F0 done"), 2, answers.append)
    assert answers == [None, None]


def test_of_runs_that_are_over_every_action_is_finished():
    outbox, answers = Outbox(), []
    outbox.begin(CALL)
    outbox.finish((1, "0F0 done"))
    outbox.put(KEY, PAYLOAD, [2])
    outbox.begin(CALL)
    outbox.ask((1, "0F0 done"), 1, answers.append)
    outbox.ask(KEY, 2, answers.append)
    outbox.ask((2, "0F0 done"), 1, answers.append)
    assert answers == [None, PAYLOAD]


def test_a_failure_answers_every_question_now_and_later():
    outbox, answers = Outbox(), []
    failure = WorkerFailure(0, "0F0", 3, "ValueError: no", "trace")
    outbox.ask(KEY, 1, answers.append)
    outbox.fail(failure)
    outbox.fail(WorkerFailure(0, "", 3, "a consequence", ""))
    outbox.ask((1, "0F1"), 1, answers.append)
    assert answers == [failure, failure]


def test_what_nobody_takes_is_named():
    outbox = Outbox()
    outbox.promise(KEY, [2])
    with pytest.raises(PipeError, match=r"0F0 by \[2\]"):
        outbox.wait_taken(before=2, timeout_s=0.01)
