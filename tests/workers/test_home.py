"""Where compute threads wake up: on processors of their own, if those have time to spare."""

import os
import threading
import time

import pytest

from rpc_pipe.workers.transport import home
from rpc_pipe.workers.transport.home import Home, home_of
from rpc_pipe.workers.transport.wakeup import Bell

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="for Linux")


@pytest.fixture(autouse=True)
def looking_every_time(monkeypatch):
    monkeypatch.setattr(home, "_LOOK_EVERY_S", 0)


def idle():
    return time.monotonic()  # of one processor


def busy():
    return 0.0


def where_it_may_run(its_home):
    """The processors of a thread before it waits, while it does, and after."""
    found, bell, known, let_go = [], Bell(its_home), threading.Event(), threading.Event()

    def waiter():
        found.append(os.sched_getaffinity(0))
        known.set()
        let_go.wait(60)
        assert bell.wait(60)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=waiter)
    thread.start()
    known.wait(60)
    before = os.sched_getaffinity(thread.native_id)
    let_go.set()
    meanwhile, deadline = before, time.monotonic() + 0.5
    while meanwhile == before and time.monotonic() < deadline:
        meanwhile = os.sched_getaffinity(thread.native_id)
        time.sleep(0.001)
    bell.ring()
    thread.join(60)
    return found[0], meanwhile, found[1]


@pytest.fixture
def processor():
    processors = os.sched_getaffinity(0)
    if len(processors) < 2:
        pytest.skip("a place to wake up needs two processors")
    return max(processors)


def test_a_thread_is_at_home_only_while_it_waits(processor):
    anywhere = os.sched_getaffinity(0)
    assert where_it_may_run(Home(processor, 1, idle)) == (anywhere, {processor}, anywhere)
    assert os.sched_getaffinity(0) == anywhere  # other threads never are


def test_busy_processors_are_nobodys_home(processor):
    anywhere = os.sched_getaffinity(0)
    assert where_it_may_run(Home(processor, 1, busy)) == (anywhere, anywhere, anywhere)


def test_a_third_of_the_time_decides(processor):
    for share, bound in ((0.2, False), (0.5, True)):
        its_home = Home(processor, 2, lambda share=share: share * 2 * time.monotonic())
        time.sleep(0.01)
        allowed = its_home.enter()
        if bound:
            its_home.leave(allowed)
        assert bool(allowed) == bound


def test_a_thread_is_not_bound_where_it_may_not_run(processor):
    anywhere = os.sched_getaffinity(0)
    assert Home(max(anywhere) + 1, 1, idle).enter() == set()
    assert os.sched_getaffinity(0) == anywhere


def test_who_was_moved_meanwhile_stays_there(processor):
    before, its_home = os.sched_getaffinity(0), Home(processor, 1, idle)
    time.sleep(0.01)
    allowed = its_home.enter()
    try:
        os.sched_setaffinity(0, {min(before)})  # as taskset(1) does it from outside
        its_home.leave(allowed)
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_a_sandbox_may_forbid_it(processor, monkeypatch):
    def forbidden(*_):
        raise PermissionError

    its_home = Home(processor, 1, idle)
    time.sleep(0.01)
    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert its_home.enter() == set()


def test_neighbours_live_apart(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    homes = [home_of(worker, 4)._processor for worker in range(4)]
    assert homes == [3, 5, 3, 5]


@pytest.mark.parametrize("processors, local_workers", [(1, 8), (2, 1), (16, 8)])
def test_who_is_alone_or_has_plenty_has_no_home(processors, local_workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert home_of(0, local_workers) is None


def test_the_system_tells_how_long_processors_have_been_idle(monkeypatch):
    from_one, since_start = home._idle_s(), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert 0 <= from_one <= (since_start + 1) * len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set())
    assert home._idle_s() == 0
