import pytest
import torch

from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.workers.transport.outbox import Outbox
from rpc_pipe.workers.transport.payload import pack

PAYLOAD = pack(torch.ones(2))
KEY = (1, "0F0")


@pytest.fixture
def answers():
    return []


@pytest.fixture
def outbox(answers):
    def answer(consumer, key, what):
        answers.append((consumer, what))
        return False  # on its way

    return Outbox(answer)


def test_asked_before_or_after_it_is_there(outbox, answers):
    outbox.ask([KEY], 1)
    outbox.promise(KEY, [1, 2])
    assert answers == [] and len(outbox) == 1
    outbox.offer(KEY, PAYLOAD, [1, 2])
    outbox.ask([KEY], 2)
    assert answers == [(1, PAYLOAD), (2, PAYLOAD)]


def test_kept_until_every_consumer_has_it_and_given_again_to_who_asks_again(outbox, answers):
    outbox.offer(KEY, PAYLOAD, [1, 2])
    outbox.ask([KEY], 1)  # lost on the way
    outbox.ask([KEY], 1)
    assert answers == [(1, PAYLOAD)] * 2
    outbox.taken([KEY], 1)
    outbox.taken([KEY], 1)
    assert outbox.untaken() == {KEY: {2}}
    outbox.taken([KEY], 2)
    assert len(outbox) == 0


def test_what_is_there_for_good_with_its_answer_is_taken():
    outbox = Outbox(lambda *_: True)
    outbox.ask([KEY], 1)
    outbox.offer(KEY, PAYLOAD, [1])
    assert len(outbox) == 0


def test_who_left_is_not_waited_for(outbox, answers):
    """Read again, not met: on a GPU a payload is on its way for a while, and an offer forgot who had left meanwhile.

    What was made for a peer after it had left was waited for too, at the end, for five minutes.
    """
    outbox.ask([KEY], 1)
    outbox.promise(KEY, [1, 2])
    outbox.leaves(1)
    outbox.offer(KEY, PAYLOAD, [1, 2])
    outbox.offer((1, "0F1"), PAYLOAD, [1])
    assert outbox.untaken() == {KEY: {2}} and answers == []


def test_that_it_is_finished_is_an_answer_without_payload(outbox, answers):
    outbox.ask([(1, "0F0 done")], 1)
    assert answers == []
    outbox.finish((1, "0F0 done"))
    outbox.ask([(1, "0F0 done")], 2)
    assert answers == [(1, None), (2, None)]


def test_of_runs_that_are_over_every_action_is_finished(outbox, answers):
    for run in (1, 2, 3):
        outbox.begin(run)
    outbox.finish((1, "0F0 done"))
    outbox.offer(KEY, PAYLOAD, [2])
    for run in (1, 3):  # an evaluation between two steps of a stream ends before the later one
        outbox.end(run)
    for key in ((1, "0F0 done"), (3, "1F0 done"), KEY, (2, "0F0 done"), (4, "0F0 done")):
        outbox.ask([key], 2)
    assert answers == [(2, None), (2, None), (2, PAYLOAD)]


def test_a_failure_answers_every_question_now_and_later(outbox, answers):
    failure = WorkerFailure(0, "0F0", 3, "ValueError: no", "trace")
    outbox.ask([KEY], 1)
    outbox.fail(failure)
    outbox.fail(WorkerFailure(0, "", 3, "a consequence", ""))
    outbox.ask([(1, "0F1")], 1)
    outbox.abandon(1)  # as who fails does with what was under way
    outbox.ask([(1, "0F2")], 1)
    assert answers == [(1, failure)] * 3


def test_who_waits_in_vain_for_a_run_that_was_given_up_is_known(outbox, answers):
    # A worker whose script ended in the middle of a step by sys.exit stayed for 10 s while the others waited for it.
    outbox.begin(2)
    outbox.abandon(1)
    assert not outbox.asked_in_vain
    outbox.ask([(1, "0F0")], 1)
    assert outbox.asked_in_vain and answers == []
