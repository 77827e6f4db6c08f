"""The exchange between two workers, over a network that this test makes up."""

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.workers.transport.exchange import Exchange
from rpc_pipe.workers.transport.message import Message
from rpc_pipe.workers.transport.outbox import Outbox
from rpc_pipe.workers.transport.payload import Payload

PAYLOAD = Payload([], None)


class Network:
    """Two workers' outboxes and exchanges; carries their messages in any order."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.exchanges = Exchange(), Exchange()
        self.outboxes = [Outbox(partial(self._answer, worker)) for worker in (0, 1)]
        self.delivered = Counter()
        self.under_way = []  # (sender, message, the request it answers)
        self.sent = 0

    def ask(self, worker, key):
        self.exchanges[worker].ask([key])
        self.send(worker)

    def publish(self, worker, key):
        self.outboxes[worker].offer(key, PAYLOAD, [1 - worker])

    def send(self, worker):
        while outgoing := self.exchanges[worker].outgoing():
            self.sent += 1
            self.under_way.append((worker, outgoing.message, outgoing.held))

    def carry(self):
        sender, message, held = self.under_way.pop(self.random.randrange(len(self.under_way)))
        receiver = 1 - sender
        if held is None:
            self.exchanges[receiver].hold("request")
        self.exchanges[receiver].received(message, own=held is not None)
        self.delivered.update(key for key, _ in message.answers)
        self.outboxes[receiver].taken(message.taken, sender)
        for key in message.asks:
            self.outboxes[receiver].ask([key], sender)
        self.send(receiver)

    def _answer(self, worker, peer, key, answer):
        self.exchanges[worker].answer(key, answer)
        self.send(worker)
        return False

    def settle(self):
        moves = 0
        while self.under_way:
            self.carry()
            moves += 1
            assert moves < 10_000


@settings(deadline=None)
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
    for worker, exchange in enumerate(network.exchanges):
        exchange.hurry()
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
    assert network.sent - before <= 33  # one more told what had arrived, before there was company for it


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
    assert network.sent - before <= 64 + 64 // 8 + 64


def test_a_failure_is_said_once_and_again_to_who_asks_again():
    exchange, failure = Exchange(), WorkerFailure(0, "0F0", 1, "ValueError", "trace")
    for _ in range(2):
        exchange.fail(failure)
        assert exchange.outgoing().message.failure is failure
        assert exchange.outgoing() is None


def test_what_could_not_be_sent_leaves_the_requests_as_they_were():
    exchange = Exchange()
    exchange.ask([(1, "F0")])
    exchange.unsent(exchange.outgoing().held)
    assert exchange._outstanding == 0
    exchange.ask([(1, "F1")])
    exchange.outgoing()
    for request in ("first", "second"):
        exchange.hold(request)
    exchange.answer((1, "B0"), PAYLOAD)
    exchange.unsent(exchange.outgoing().held)
    assert exchange.close()[1] == ["first", "second"]


def test_one_request_always_stays_with_the_peer_so_that_its_death_is_noticed():
    network = Network()
    network.ask(0, (1, "B0"))
    network.settle()
    for m in range(20):
        network.publish(1, (1, f"B{m}"))
        network.ask(0, (1, f"B{m + 1}"))
        network.settle()
        assert network.exchanges[0]._outstanding >= 1


def test_after_a_goodbye_nothing_is_said():
    exchange = Exchange()
    exchange.hold("request")
    exchange.ask([(1, "F0")])
    assert exchange.close() == (Message([(1, "F0")], [], []), ["request"])
    exchange.ask([(1, "F1")])
    assert exchange.outgoing() is None


@pytest.mark.parametrize("count", [7, 8])
def test_arrivals_are_told_alone_only_when_there_are_many(count):
    exchange = Exchange()
    exchange.ask([(1, f"F{m}") for m in range(count)])
    assert exchange.outgoing() is not None
    for m in range(count):
        exchange.received(Message([], [], [((1, f"F{m}"), PAYLOAD)]), own=False)
    assert exchange.urgent == (count == 8)
