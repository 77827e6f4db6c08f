"""Nothing is lost and nothing comes twice, whenever the connection between two workers breaks."""

import random
from collections import deque

import pytest

from rpc_pipe.workers.transport.delivery import Delivery


class Line:
    """Two ends, and what is under way to each: in order, lost when the connection breaks."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.ends = Delivery(), Delivery()
        self.under_way = deque(), deque()
        self.heard = [], []
        self.sent = 0

    def say(self, end, what):
        self.put(end, "say", self.ends[end].say(what), what)

    def put(self, end, kind, said, what=None):
        self.sent += 1
        self.under_way[1 - end].append((kind, said, what))

    def carry(self, end):
        if not self.under_way[end]:
            return
        (kind, said, what), here = self.under_way[end].popleft(), self.ends[end]
        if kind == "again":
            for again, content in here.again(what, said.arrived):
                self.put(end, "say", again, content)
            return
        if kind == "tick":
            here.ticked(said)
        elif here.take(said):
            self.heard[end].append(what)
        if (missed := here.gap(said)) is not None:
            self.put(end, "again", here.tick(), missed)

    def look_after(self):
        for end in (0, 1):
            if self.ends[end].is_open:
                self.put(end, "tick", self.ends[end].tick())
                if (missed := self.ends[end].unanswered) is not None:
                    self.put(end, "again", self.ends[end].tick(), missed)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_breaks_all_arrives_once_and_in_order(seed):
    line, number = Line(seed), 0
    for _ in range(600):
        event = line.random.random()
        if event < 0.4:
            number += 1
            line.say(number % 2, number)
        elif event < 0.9:
            line.carry(line.random.randrange(2))
        elif event < 0.95:
            line.under_way[line.random.randrange(2)].clear()  # a connection breaks
        else:
            line.look_after()
    for _ in range(20):
        line.look_after()
        while any(line.under_way):
            line.carry(0)
            line.carry(1)
    assert line.heard[1] == list(range(2, number + 1, 2)) and line.heard[0] == list(range(1, number + 1, 2))
    assert not any(end.is_open or end._kept for end in line.ends)


def test_what_is_still_under_way_does_not_make_it_said_again():
    line = Line(0)
    for number in range(5):
        line.say(0, number)
    line.under_way[1].popleft()  # lost, and four others come after it
    for _ in range(4):
        line.carry(1)
    assert len(line.under_way[0]) == 1, "asked once"
    line.carry(0)
    while line.under_way[1]:
        line.carry(1)
    assert line.heard[1] == list(range(5)) and line.sent == 5 + 1 + 5


def test_a_peer_that_says_nothing_is_told_what_has_arrived_now_and_then():
    line = Line(0)
    for number in range(40):
        line.say(0, number)
        line.carry(1)
    assert line.ends[1].owes and line.ends[1].is_open
    line.ends[1].tick()
    assert not line.ends[1].owes and not line.ends[1].is_open
