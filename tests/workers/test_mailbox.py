"""A worker's end of its carrier."""

import itertools
import sys
import threading

import pytest
import torch
from refusals import refused

from rpc_pipe.dependency import PeerLost, PipeError, Stalled, WorkerFailure
from rpc_pipe.workers.compute.devices.device import DeviceBackend
from rpc_pipe.workers.mailbox import Mailbox
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.local import local_carriers
from rpc_pipe.workers.transport.payload import Payload, pack

PAYLOAD = pack(torch.ones(2))
RUN = 1
CALL = Call(0, "step 0")


@pytest.fixture
def mailboxes():
    both = [Mailbox(carrier, DeviceBackend(), stall_s=0.05) for carrier in local_carriers(2)]
    for mailbox in both:
        assert mailbox.begin(CALL) == RUN
    return both


def test_what_is_pulled_arrives_once_it_is_published(mailboxes):
    first, second = mailboxes
    second.pull(RUN, 0, ["0F0", "0F1 done"])
    assert second.arrivals((RUN,)) == []
    first.publish(RUN, "0F0", PAYLOAD, [1])
    first.carrier.outbox.finish((RUN, "0F1 done"))
    arrived, finished = second.arrivals((RUN,))
    assert arrived[:3] == (0, (RUN, "0F0"), PAYLOAD) and finished[:3] == (0, (RUN, "0F1 done"), None)


def test_who_is_runs_behind_still_learns_what_was_finished(mailboxes):
    """Varuna over RPC hung within 100 steps: workers that gave away their weights without waiting ran two runs
    ahead, and forgot what they had finished before the slower ones had asked for it."""
    first, second = mailboxes
    first.carrier.outbox.finish((RUN, "0F1 done"))
    for run in range(RUN, 4):
        first.carrier.end(run)
        first.begin(CALL)
    second.pull(RUN, 0, ["0F1 done"])
    assert [arrival.key for arrival in second.arrivals((RUN,))] == [(RUN, "0F1 done")]


def test_of_overlapping_runs_each_gets_its_own(mailboxes):
    first, second = mailboxes
    for mailbox in mailboxes:
        assert mailbox.begin(CALL) == 2
    for run in (1, 2):
        second.pull(run, 0, ["0F0"])
        first.publish(run, "0F0", PAYLOAD, [1])
    assert [arrival.key[0] for arrival in second.next_arrivals((2,), str)] == [2]
    assert [arrival.key[0] for arrival in second.next_arrivals((1, 2), str)] == [1]


def test_what_another_thread_of_the_worker_has_done_arrives_too(mailboxes):
    first, _ = mailboxes
    first.carrier.deliver((RUN, "0F3"), None)
    assert [a[:3] for a in first.next_arrivals((RUN,), str)] == [(0, (RUN, "0F3"), None)]


def test_of_an_abandoned_run_nothing_is_kept_and_nothing_comes(mailboxes):
    first, second = mailboxes
    second.pull(RUN, 0, ["0F0"])
    first.publish(RUN, "0F0", PAYLOAD, [1])
    first.publish(RUN, "0F1", PAYLOAD, [1])
    first.carrier.abandon(RUN)
    second.pull(RUN, 0, ["0F1"])
    second.carrier.abandon(RUN)
    assert len(first.carrier.outbox) == 0 and second.arrivals((RUN + 1,)) == []


def test_a_run_may_be_abandoned_while_a_thread_that_copies_delivers(mailboxes):
    """The dict of what is awaited changed its size while it was copied."""
    first, ends, interval = mailboxes[0], threading.Event(), sys.getswitchinterval()
    first.pull(RUN, 1, [f"1F{m}" for m in range(1000)])

    def deliver():
        for m in itertools.takewhile(lambda _: not ends.is_set(), itertools.count()):
            first.carrier.deliver((RUN, f"0F{m}"), None)

    thread = threading.Thread(target=deliver)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(100):
            first.carrier.abandon(RUN + 1)
            assert all(arrival.peer == 0 for arrival in first.arrivals((RUN,)))
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_who_waits_in_vain_says_for_what(mailboxes):
    with refused("worker", Stalled):
        mailboxes[1].next_arrivals((RUN,), lambda: "the moon")


def test_what_nobody_takes_is_named(mailboxes):
    first, _ = mailboxes
    first.publish(RUN, "0F0", PAYLOAD, [1])
    with refused("outbox", PipeError):
        first.carrier.wait_taken(None, first.stall_s)


def test_a_peer_that_failed_is_named_with_its_cause():
    carriers = local_carriers(2)
    failure = WorkerFailure(0, "0F0", 1, "ValueError: no", "trace")
    carriers[0].fail(failure)
    mailbox = Mailbox(carriers[1], DeviceBackend(), stall_s=1)
    mailbox.begin(CALL)
    mailbox.pull(RUN, 0, ["0F0"])
    with refused("worker", PeerLost) as raised:
        mailbox.arrivals((RUN,))
    assert raised.value.cause is failure


def test_a_thread_beside_the_compute_thread_fails_the_worker_with_its_own_error(mailboxes):
    first, _ = mailboxes
    threading.Timer(0.01, first.carrier.deliver, ((RUN, "0F0"), ArithmeticError("in the copy"))).start()
    with pytest.raises(ArithmeticError, match="in the copy"):
        first.next_arrivals((RUN,), str)


@pytest.mark.parametrize("in_step", [True, False])
def test_a_payload_for_a_device_is_on_its_way_there_before_it_is_read(in_step):
    class Far(DeviceBackend):
        def enter(self, payload):
            return Payload(payload.tensors, "entered")

    backend = Far()
    backend.in_step = in_step
    carriers = local_carriers(2)
    first, second = Mailbox(carriers[0], DeviceBackend(), 1), Mailbox(carriers[1], backend, 1)
    second.begin(CALL)
    second.pull(RUN, 0, ["0F0"], to_compute=True)
    second.pull(RUN, 0, ["result"])
    for what in ("0F0", "result"):
        first.publish(RUN, what, PAYLOAD, [1])
    found = {arrival.key[1]: arrival.answer.skeleton for arrival in second.arrivals((RUN,))}
    assert (found["0F0"] == "entered") == (not in_step)
    assert found["result"] == PAYLOAD.skeleton, "it is read on the CPU"
