"""The exchange between two workers, over a network that this test makes up."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc_pipe.workers.transport.exchange import Exchange, Message
from rpc_pipe.workers.transport.outbox import Outbox
from rpc_pipe.workers.transport.payload import Payload

PAYLOAD = Payload([], None)


class Network:
    """Two workers' outboxes and exchanges; carries their messages in any order."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.exchanges = Exchange(), Exchange()
        self.outboxes = Outbox(), Outbox()
        self.delivered = Counter()
        self.under_way = []  # (sender, message, the request it answers)
        self.sent = 0

    def ask(self, worker, key):
        def deliver(answer):
            self.delivered[key] += 1

        self.exchanges[worker].ask({key: deliver})
        self.send(worker)

    def publish(self, worker, key):
        self.outboxes[worker].put(key, PAYLOAD, [1 - worker])

    def send(self, worker):
        while outgoing := self.exchanges[worker].outgoing():
            self.sent += 1
            self.under_way.append((worker, outgoing.message, outgoing.held))

    def carry(self):
        sender, message, held = self.under_way.pop(self.random.randrange(len(self.under_way)))
        receiver = 1 - sender
        if held is None:
            self.exchanges[receiver].hold("request")
        for deliver, answer in self.exchanges[receiver].received(message, own=held is not None):
            deliver(answer)
        self.outboxes[receiver].taken(message.taken, sender)
        for key in message.asks:
            self.outboxes[receiver].ask(key, sender, lambda answer, key=key: self._answer(receiver, key, answer))
        self.send(receiver)

    def _answer(self, worker, key, answer):
        self.exchanges[worker].answer(key, answer)
        self.send(worker)

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
    for worker, exchange in enumerate(network.exchanges):
        exchange.flush()
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


def test_a_lost_peer_is_told_to_whoever_waits():
    exchange, told = Exchange(), []
    exchange.ask({(1, "F0"): told.append})
    assert exchange.outgoing() is not None
    for deliver in exchange.broken():
        deliver("gone")
    assert told == ["gone"]
    assert exchange.broken() == []


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
    exchange.ask({(1, "F0"): lambda answer: None})
    assert exchange.close() == ["request"]
    assert exchange.outgoing() is None


@pytest.mark.parametrize("count", [7, 8])
def test_arrivals_are_told_alone_only_when_there_are_many(count):
    exchange = Exchange()
    exchange.ask({(1, f"F{m}"): lambda answer: None for m in range(count)})
    assert exchange.outgoing() is not None
    for m in range(count):
        exchange.received(answering((1, f"F{m}")), own=False)
    assert exchange.urgent == (count == 8)


def answering(key):
    return Message([], [], [(key, PAYLOAD)])
