"""Who hears what comes: the compute thread while it waits, and a thread for that while it does not."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from carriers import zmq_carriers

from rpc_pipe.workers.transport import zeromq
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.payload import pack, unpack
from rpc_pipe.workers.transport.sockets import Sockets
from rpc_pipe.workers.transport.values import Malformed

RUN = 1


@pytest.fixture
def pair():
    carriers = zmq_carriers(2)
    for carrier in carriers:
        assert carrier.begin(Call(0, "step 0")) == RUN
    yield carriers
    for carrier in carriers:
        carrier.close()


def payload(number):
    return pack(torch.tensor([float(number)]))


def awaited(carrier, name):
    """Wait for `name`, and return it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for arrived in carrier.poll((RUN,)):
            assert arrived.key == (RUN, name)
            return unpack(arrived.answer)
        carrier.wait(1)
    raise AssertionError(f"{name} has not come")


def test_a_waiting_compute_thread_hears_by_itself(pair, monkeypatch):
    """A thread that heard for it had to wake it: 51 ms a step of 1 MiB over unix sockets, where 42 are enough."""
    heard_by = []
    monkeypatch.setattr(Sockets, "hear", lambda by, hear=Sockets.hear: noted(hear(by)))

    def noted(pieces):
        if pieces is not None:
            heard_by.append(threading.current_thread().name)
        return pieces

    here, there = pair
    for m in range(10):
        here.pull(1, RUN, [f"1F{m}"])
        threading.Timer(0.05, there.outbox.offer, ((RUN, f"1F{m}"), payload(m), [0])).start()
        assert awaited(here, f"1F{m}") == m
    assert "MainThread" in heard_by[-4:]


def test_who_computes_for_long_or_leaves_the_pipeline_alone_is_heard_for(pair):
    """Its compute thread has waited, so it heard; then it did not come back, and the other's question had no answer."""
    here, there = pair
    there.outbox.offer((RUN, "1F0"), payload(7), [0])
    there.wait(0.001)
    here.pull(1, RUN, ["1F0"])
    assert awaited(here, "1F0") == 7


@pytest.mark.parametrize("error", [KeyboardInterrupt, Malformed])
def test_what_ends_the_hearing_of_a_waiting_thread_is_for_its_caller(pair, monkeypatch, error):
    """Ctrl-C while a message was taken in became an error of "a thread of the worker", as it does on other threads.

    Then nobody was told of what came later, as the descriptor tells nothing until all has been heard: leaving took 5 s.
    """
    here, there = pair
    monkeypatch.setattr(zeromq, "_LOOK_S", 0.5)  # the hearer's thread, which gets no Ctrl-C, does not take over

    def received(*_):
        raise error("as if from outside")

    here.pull(1, RUN, ["1F0"])
    threading.Timer(0.2, there.outbox.offer, ((RUN, "1F0"), payload(0), [0])).start()
    with monkeypatch.context() as patched:
        patched.setattr(here.post.link, "_ears", here.post.link._ears._replace(on_message=received))
        with pytest.raises(error, match="as if from outside"):
            awaited(here, "1F0")
    assert here.post.request(1, "clock").result(30) > 0


def test_both_threads_hear_and_nothing_is_lost_or_heard_twice(pair):
    count = 100

    def work(carrier):
        draw, peer, found = random.Random(carrier.worker), 1 - carrier.worker, []
        deadline = time.monotonic() + 60
        for m in range(count):
            carrier.pull(peer, RUN, [f"{peer}F{m}"])
            carrier.outbox.offer((RUN, f"{carrier.worker}F{m}"), payload(m), [peer])
            time.sleep(draw.choice([0, 0, 0, 0.001, 0.03]))  # computes
            for _ in range(draw.randrange(3)):
                carrier.wait(draw.choice([0, 0.001, 0.01]))
                found += carrier.poll((RUN,))
        while len(found) < count and time.monotonic() < deadline:
            carrier.wait(1)
            found += carrier.poll((RUN,))
        # Two threads answer questions, so neighbours may swap.
        assert sorted(float(unpack(arrived.answer)) for arrived in found) == list(range(count))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, pair))


def test_the_end_is_heard_of_while_the_last_payloads_are_taken(pair):
    """Who leaves waits until the others have taken what is for them, and is told so by what it hears itself."""
    here, there = pair
    there.outbox.offer((RUN, "1F0"), payload(1), [0])
    there.wait(0.001)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(there.wait_taken, None, 30)
        here.pull(1, RUN, ["1F0"])
        assert awaited(here, "1F0") == 1
        while not taken.done():  # that it has been taken is said with the next message, or when asked
            here.wait(0.01)
            here.poll((RUN,))
        taken.result()
