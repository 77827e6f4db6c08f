"""What workers say to each other in how many messages, over a network that this test makes up."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from carriers import loopback_carriers
from hypothesis import given
from hypothesis import strategies as st

from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.workers.transport import messages
from rpc_pipe.workers.transport.message import Message
from rpc_pipe.workers.transport.messages import PeerQueue
from rpc_pipe.workers.transport.outbox import Outbox
from rpc_pipe.workers.transport.payload import Payload

PAYLOAD = Payload([], None)


class Network:
    """Two workers' outboxes and what they say; carries their messages in any order."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.talks = PeerQueue(), PeerQueue()
        self.outboxes = [Outbox(partial(self._answer, worker)) for worker in (0, 1)]
        self.delivered = Counter()
        self.under_way = []  # (sender, message)
        self.sent = 0

    def ask(self, worker, key):
        self.talks[worker].ask([key])
        self.send(worker)

    def publish(self, worker, key):
        self.outboxes[worker].offer(key, PAYLOAD, [1 - worker])

    def send(self, worker):
        while (message := self.talks[worker].gathered()) is not None:
            self.sent += 1
            self.under_way.append((worker, message))

    def carry(self):
        sender, message = self.under_way.pop(self.random.randrange(len(self.under_way)))
        receiver = 1 - sender
        self.talks[receiver].received(message)
        self.delivered.update(key for key, _ in message.answers)
        self.outboxes[receiver].taken(message.taken, sender)
        for key in message.asks:
            self.outboxes[receiver].ask([key], sender)
        self.send(receiver)

    def _answer(self, worker, peer, key, answer):
        self.talks[worker].answer(key, answer)
        self.send(worker)
        return False

    def settle(self):
        moves = 0
        while self.under_way:
            self.carry()
            moves += 1
            assert moves < 10_000


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_every_question_is_answered_once_in_any_order(seed, count):
    network = Network(seed)
    todo = [(action, worker, (1, f"{worker}{m}")) for worker in (0, 1) for m in range(count) for action in "ap"]
    network.random.shuffle(todo)
    for action, worker, key in todo:
        network.ask(1 - worker, key) if action == "a" else network.publish(worker, key)
        if network.under_way and network.random.random() < 0.5:
            network.carry()
    network.settle()
    assert network.delivered == {key: 1 for _, _, key in todo}
    for worker, talk in enumerate(network.talks):
        talk.hurry()
        network.send(worker)
    network.settle()
    assert [len(outbox) for outbox in network.outboxes] == [0, 0]


def test_where_payloads_go_both_ways_each_costs_one_message():
    """As between two stages of 1F1B: forwards one way, backwards the other, asked for at the start."""
    network = Network()
    for m in range(16):
        network.ask(1, (1, f"F{m}"))
        network.ask(0, (1, f"B{m}"))
    network.settle()
    before = network.sent
    for m in range(16):
        network.publish(0, (1, f"F{m}"))
        network.settle()
        if m >= 3:
            network.publish(1, (1, f"B{m - 3}"))
            network.settle()
    for m in range(13, 16):
        network.publish(1, (1, f"B{m}"))
        network.settle()
    assert sum(network.delivered.values()) == 32
    assert network.sent - before == 32


def test_where_payloads_go_one_way_few_messages_are_alone():
    network = Network()
    for m in range(64):
        network.ask(1, (1, f"F{m}"))
        network.settle()
    before = network.sent
    for m in range(64):
        network.publish(0, (1, f"F{m}"))
        network.settle()
    assert sum(network.delivered.values()) == 64
    assert network.sent - before == 64 + 64 // 8


def test_a_failure_is_said_once_and_again_to_who_asks_again():
    talk, failure = PeerQueue(), WorkerFailure(0, "0F0", 1, "ValueError", "trace")
    for _ in range(2):
        talk.fail(failure)
        assert talk.gathered().failure is failure
        assert talk.gathered() is None


def test_after_a_goodbye_nothing_is_said():
    talk = PeerQueue()
    talk.ask([(1, "F0")])
    assert talk.close() == Message([(1, "F0")], [], [])
    talk.ask([(1, "F1")])
    assert talk.gathered() is None


@pytest.mark.parametrize("count", [7, 8])
def test_arrivals_are_told_alone_only_when_there_are_many(count):
    talk = PeerQueue()
    talk.ask([(1, f"F{m}") for m in range(count)])
    assert talk.gathered() is not None
    for m in range(count):
        talk.received(Message([], [], [((1, f"F{m}"), PAYLOAD)]))
    assert talk.urgent == (count == 8)


def test_two_threads_that_come_first_share_one_talk(monkeypatch):
    """Read, not met: a hearing thread and the compute thread could each begin to talk to the same peer.

    One of the two was lost with the questions in it, and nobody would ever have answered them.
    """
    together = threading.Barrier(2)

    class SlowTalk(PeerQueue):
        def __init__(self):
            super().__init__()
            together.wait(10)

    monkeypatch.setattr(messages, "PeerQueue", SlowTalk)
    carrier, _ = loopback_carriers(2)
    with ThreadPoolExecutor(2) as pool:
        talks = list(pool.map(carrier.post._talk, [1, 1]))
    assert talks[0] is talks[1] is carrier.post._talk(1)


def test_requests_are_replied_to_and_given_up_with_their_peer():
    first, second = loopback_carriers(2)
    second.serve_board = lambda seen: bytes([seen])
    assert first.look(1, 7).result(10) == b"\7"
    assert first.silent() == []
    first.post.link.cut_off.add(1)
    with pytest.raises(RuntimeError, match="worker 1 cannot be reached"):
        first.look(1, 7).result(10)
    assert first.silent() == [1]
