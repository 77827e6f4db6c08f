"""A worker's end of the carrier."""

import pytest
import torch

from rpc_pipe.dependency import F, PeerLost, Stalled
from rpc_pipe.workers.compute.device import CpuCourier
from rpc_pipe.workers.mailbox import Mailbox
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.local import LocalCarrier
from rpc_pipe.workers.transport.outbox import Outbox
from rpc_pipe.workers.transport.payload import pack

PAYLOAD = pack(torch.ones(2))


@pytest.fixture
def mailboxes():
    outboxes = [Outbox(), Outbox()]
    both = [Mailbox(LocalCarrier(worker, outboxes), CpuCourier(), stall_s=0.05) for worker in range(2)]
    for mailbox in both:
        mailbox.begin(Call(0, "step 0"))
    return both


def test_what_is_pulled_arrives_once_it_is_published(mailboxes):
    first, second = mailboxes
    second.pull(0, [(F(0, 0), True), (F(0, 1), False)])
    assert second.arrivals() == []
    first.publish("0F0", PAYLOAD, [1])
    first.finished("0F1")
    arrived, finished = second.arrivals()
    assert (arrived.what, arrived.peer, arrived.payload) == (F(0, 0), 0, PAYLOAD)
    assert (finished.what, finished.peer, finished.payload) == (F(0, 1), 0, None)


def test_who_is_runs_behind_still_learns_what_was_finished(mailboxes):
    """Varuna over RPC hung within 100 steps: workers that gave away their weights without waiting ran two runs
    ahead, and forgot what they had finished before the slower ones had asked for it."""
    first, second = mailboxes
    first.finished("0F1")
    for _ in range(3):
        first.begin(Call(0, "step 0"))
    second.pull(0, [(F(0, 1), False)])
    assert [arrival.what for arrival in second.arrivals()] == [F(0, 1)]


def test_what_a_worker_publishes_for_itself_arrives_too(mailboxes):
    first, _ = mailboxes
    first.publish("result", PAYLOAD, [], here=True)
    assert first.next_arrival(str).payload is PAYLOAD


def test_who_waits_in_vain_says_for_what(mailboxes):
    with pytest.raises(Stalled, match=r"nothing arrived for 0\.05 s, waiting for the moon"):
        mailboxes[1].next_arrival(lambda: "the moon")


def test_a_peer_that_is_gone_is_named(mailboxes):
    class Broken(LocalCarrier):
        def pull(self, peer, questions, *, polled):
            for deliver in questions.values():
                deliver("connection reset", 0)

    mailbox = Mailbox(Broken(1, [Outbox(), Outbox()]), CpuCourier(), stall_s=1)
    mailbox.pull(0, [(F(0, 0), True)])
    with pytest.raises(PeerLost, match="worker 0"):
        mailbox.arrivals()


@pytest.mark.parametrize("in_step", [True, False])
def test_a_compute_thread_that_runs_ahead_of_its_device_receives_nothing_itself(in_step):
    asked = []

    class Noted(LocalCarrier):
        def pull(self, peer, questions, *, polled):
            asked.append(polled)

    courier = CpuCourier()
    courier.in_step = in_step
    mailbox = Mailbox(Noted(1, [Outbox(), Outbox()]), courier, stall_s=0.01)
    mailbox.pull(0, [(F(0, 0), True)])
    assert asked == [in_step]


def test_a_barrier_takes_no_memory_from_everyone_to_everyone():
    """Read, not met: 64 workers on a host would have taken 4 GiB for what they say once."""
    asked = []

    class Noted(LocalCarrier):
        def pull(self, peer, questions, *, polled):
            asked.append((peer, polled))

    mailbox = Mailbox(Noted(1, [Outbox(), Outbox(), Outbox()]), CpuCourier(), stall_s=0.01)
    with pytest.raises(Stalled):
        mailbox.collect("barrier", [0, 2])
    assert asked == [(0, False), (2, False)]
