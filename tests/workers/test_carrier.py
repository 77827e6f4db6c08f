"""What every carrier does alike: threads, messages between threads, ZeroMQ, with and without shared memory."""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from carriers import loopback_carriers, zmq_carriers
from refusals import refused

from rpc_pipe.dependency import PipeError, WorkerFailure
from rpc_pipe.workers.transport import carrier as carrier_module
from rpc_pipe.workers.transport import messages, shared_memory
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.carrier import LEFT
from rpc_pipe.workers.transport.local import local_carriers
from rpc_pipe.workers.transport.message import NOTHING
from rpc_pipe.workers.transport.payload import Payload, pack, unpack

KINDS = {
    "local": local_carriers,
    "messages": lambda n: loopback_carriers(n, shared_memory=False),
    "messages and shared memory": loopback_carriers,
    "unix sockets": zmq_carriers,
    "unix sockets and shared memory": lambda n: zmq_carriers(n, shared_memory=True),
    "TCP with CURVE": lambda n: zmq_carriers(n, tcp=True),
}
FAILURE = WorkerFailure(0, "0F0", 3, "ValueError: no", "trace")
RUN = 1
CALL = Call(0, "step 0")


def begun(carriers):
    for carrier in carriers:
        assert carrier.begin(CALL) == RUN
    return carriers


@pytest.fixture(params=KINDS)
def make(request, monkeypatch):
    monkeypatch.setattr(messages, "_LEAVE_S", 0.5)
    monkeypatch.setattr(carrier_module, "_DRAIN_S", 0.5)
    made = []

    def carriers(number):
        made.extend(begun(KINDS[request.param](number)))
        return made

    yield carriers
    for carrier in made:
        carrier.close()


def wait_for(carrier, count, runs=(RUN,)):
    """Return by key what has arrived, once there is so much of it."""
    found, deadline = {}, time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found |= {(arrived.peer, *arrived.key): arrived.answer for arrived in carrier.poll(runs)}
        if len(found) < count:
            carrier.wait(1)
    assert len(found) == count, found
    return found


def test_what_is_pulled_arrives_once_whether_it_is_there_or_not(make):
    first, second = make(2)
    tree = (torch.randn(3), {"mask": torch.zeros(100_000, dtype=torch.bool), "scale": 2})
    first.outbox.offer((RUN, "0F0"), pack(tree), [1])
    second.pull(0, RUN, ["0F0", "0F1", "0F2 done", "0F3 done"])
    first.outbox.finish((RUN, "0F2 done"))
    found = wait_for(second, 2)
    first.outbox.offer((RUN, "0F1"), pack(None), [1])
    first.outbox.end(RUN)
    second.pull(0, RUN, ["0F4 done"])
    first.outbox.finish((RUN, "0F3 done"))
    found |= wait_for(second, 3)
    arrived = unpack(found[0, RUN, "0F0"])
    assert torch.equal(arrived[0], tree[0]) and torch.equal(arrived[1]["mask"], tree[1]["mask"])
    assert arrived[1]["scale"] == 2 and unpack(found[0, RUN, "0F1"]) is None
    assert [found[0, RUN, f"0F{m} done"] for m in (2, 3, 4)] == [None] * 3
    first.wait_taken(None, 30)
    assert len(first.outbox) == 0


def test_runs_are_told_apart(make):
    first, second = make(2)
    for carrier in (first, second):
        assert carrier.begin(CALL) == 2
    second.pull(0, 1, ["0F0"])
    second.pull(0, 2, ["0F0"])
    for run in (2, 1):
        first.outbox.offer((run, "0F0"), pack(run), [1])
    assert unpack(wait_for(second, 1, (1,))[0, 1, "0F0"]) == 1
    assert unpack(wait_for(second, 1, (1, 2))[0, 2, "0F0"]) == 2


def test_what_is_not_taken_is_waited_for_until_a_deadline(make):
    first, _ = make(2)
    first.outbox.offer((RUN, "0F0"), pack(None), [1])
    first.wait_taken(RUN, 0)
    with refused("outbox", PipeError):
        first.wait_taken(RUN + 1, 0.02)
    first.outbox.leaves(1)
    first.wait_taken(RUN + 1, 0)


def test_waiting_ends_when_something_comes_and_has_a_deadline(make):
    first, second = make(2)
    # It may wake for nothing, as for the last word of meeting, which is heard by polling.
    assert any(not (second.poll((RUN,)) or second.wait(0.01)) for _ in range(100))
    second.pull(0, RUN, ["0F0"])
    timer = threading.Timer(0.05, first.outbox.offer, ((RUN, "0F0"), pack(None), [1]))
    timer.start()
    assert wait_for(second, 1)
    assert second.poll((RUN,)) == []


def test_a_failure_answers_what_was_asked_before_and_after(make):
    first, second = make(2)
    second.pull(0, RUN, ["0F0"])
    first.fail(FAILURE)
    second.pull(0, RUN, ["0F1"])
    for answer in wait_for(second, 2).values():
        assert isinstance(answer, WorkerFailure) and str(answer) == str(FAILURE)


def test_an_error_on_the_way_to_the_device_is_the_receivers(make):
    first, second = make(2)

    def enter(payload):
        raise ArithmeticError("no room")

    second.pull(0, RUN, ["0F0"], enter)
    first.outbox.offer((RUN, "0F0"), pack(None), [1])
    with pytest.raises(ArithmeticError, match="no room"):
        wait_for(second, 1)
    first.poll((RUN,))


def test_a_payload_enters_its_device_before_it_is_polled(make):
    first, second = make(2)
    second.pull(0, RUN, [f"0F{m}" for m in range(6)], lambda payload: Payload(payload.tensors, "entered"))
    for m in range(6):
        first.outbox.offer((RUN, f"0F{m}"), pack(torch.ones(2)), [1])
    assert {answer.skeleton for answer in wait_for(second, 6).values()} == {"entered"}


@pytest.mark.parametrize("seed", range(3))
def test_many_workers_that_exchange_at_random_lose_nothing(make, seed):
    """Each worker pulls from each other in turns, payloads of all sizes, in threads that are slow at random."""
    number, count = 3, 30
    carriers = make(number)

    def work(carrier):
        draw = random.Random(f"{seed} {carrier.worker}")
        others = [peer for peer in range(number) if peer != carrier.worker]
        found = {}
        for run in (1, 2):
            assert run == 1 or carrier.begin(CALL) == run
            carrier.wait_taken(run - 1, 30)
            todo = [("ask", peer, m) for peer in others for m in range(count)] + [("offer", 0, m) for m in range(count)]
            draw.shuffle(todo)
            for what, peer, m in todo:
                if what == "ask":
                    carrier.pull(peer, run, [f"{peer}F{m}"])
                else:
                    tensor = torch.full((draw.choice([1, 64, 20_000, 100_000]),), float(m))
                    carrier.outbox.offer((run, f"{carrier.worker}F{m}"), pack(tensor), others)
                if draw.random() < 0.3:
                    found |= {(a.peer, *a.key): a.answer for a in carrier.poll((run,))}
                if draw.random() < 0.05:
                    carrier.wait(0.001)
            found |= wait_for(carrier, 2 * count * run - len(found), (run,))
            carrier.end(run)
        for (_, _, name), answer in found.items():
            assert float(unpack(answer)[-1]) == int(name.partition("F")[2])
        carrier.wait_taken(None, 30)
        return len(carrier.outbox)

    with ThreadPoolExecutor(number) as pool:
        assert list(pool.map(work, carriers)) == [0] * number


def test_neighbours_that_say_much_share_memory_and_who_sends_to_a_device_does_not():
    if not shared_memory.POSSIBLE:
        pytest.skip("there is no shared memory here")
    for enter in (None, lambda payload: payload):
        first, second = begun(loopback_carriers(2))
        for m in range(8):
            second.pull(0, RUN, [f"0F{m}"], enter)
            first.outbox.offer((RUN, f"0F{m}"), pack(torch.ones(2)), [1])
            wait_for(second, 1)
        assert bool(second.post.channels._readers) == (enter is None)
        first.close()
        second.close()


def test_a_sender_that_cannot_send_fails_its_worker_and_the_others_learn_why():
    """A replica's sparse gradient could not be sent. The sender's thread died, and with it the cause."""
    first, second = begun(loopback_carriers(2, shared_memory=False))
    first.poll((RUN,))  # busy from now: its sender's thread sends
    second.pull(0, RUN, ["0G0"])
    second.wait(0.05)
    first.outbox.offer((RUN, "0G0"), Payload([torch.ones(3, device="meta")], None), [1])
    with refused("payload"):
        wait_for(first, 1)
    first.fail(FAILURE)  # as the worker does with it
    assert isinstance(wait_for(second, 1)[0, RUN, "0G0"], WorkerFailure)
    first.close()
    second.close()


def test_a_thread_that_is_ended_by_more_than_an_error_fails_its_worker():
    """It ended silently, and after a while all workers said that a message had been lost."""
    first, second = begun(loopback_carriers(2, shared_memory=False))
    with first.post.answering_for_errors:
        sys.exit("enough")
    with refused("thread", PipeError):
        wait_for(first, 1)
    first.fail(FAILURE)
    first.close()
    second.close()


def test_a_peer_that_breaks_or_ends_is_told_to_whoever_waits(monkeypatch):
    monkeypatch.setattr(messages, "_LAST_WORDS_S", 0.05)
    first, second, third = begun(loopback_carriers(3))
    third.post.received(0, NOTHING)  # worker 0 has talked
    third.pull(0, RUN, ["0F0"])
    third.pull(1, RUN, ["1F0"])
    third.post.link.cut_off.add(0)
    third.wait(0)
    second.close()
    found = wait_for(third, 2)
    assert found[0, RUN, "0F0"] == "connection reset"
    assert found[1, RUN, "1F0"] == LEFT
    third.pull(1, RUN, ["1F1"])
    assert wait_for(third, 1)
    first.close()
    third.close()


@pytest.mark.parametrize("near", [True, False])
def test_questions_on_a_host_leave_behind_the_first_action_unless_the_worker_waits(near, monkeypatch):
    """The sender's thread took the interpreter from the first forward of a step, for which all others waited."""
    carriers = begun(loopback_carriers(2))
    monkeypatch.setattr(shared_memory.Channels, "reads", lambda channels, peer: near)
    sent = []
    for carrier in carriers:
        send = carrier.post.link.send
        carrier.post.link.send = lambda peer, message, send=send: (sent.append(message.asks), send(peer, message))
        for _ in range(10):  # it has not waited for long
            carrier.poll((RUN,))
        carrier.pull(1 - carrier.worker, RUN, ["1F0", "1F1"])
        if near:
            carrier.poll((RUN,))
            assert carrier.post._to_send.empty() and not sent
        if near and carrier.worker == 0:
            carrier.wait(0)
        else:
            carrier.poll((RUN,))
        deadline = time.monotonic() + 30
        while not sent and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [name for _, name in sent.pop()][1:] == ["1F0", "1F1"]
    for carrier in carriers:
        carrier.close()


def test_the_sender_ends_with_its_carrier():
    for carrier in begun(loopback_carriers(2)):
        carrier.close()
        assert not carrier.post._sender.is_alive()
