"""Bells, between threads and between processes."""

import gc
import os
import signal
import threading
import time

import pytest

from rpc_pipe.workers.transport.wakeup import Bell, Ringer

linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="for Linux")


@pytest.fixture
def bell():
    return Bell()


def test_a_ring_before_the_wait_is_not_lost(bell):
    bell.ring()
    assert bell.wait(60)


def test_many_rings_end_one_wait(bell):
    for _ in range(3):
        bell.ring()
    assert bell.wait(60)
    assert not bell.wait(0.01)


def test_no_ring_no_wake(bell):
    assert not bell.wait(0)
    assert not bell.wait(0.01)


def test_a_wait_has_its_own_deadline_whatever_those_before_had(bell):
    bell.ring()
    assert bell.wait(1e6)
    began = time.monotonic()
    assert not bell.wait(0.2)
    assert time.monotonic() - began >= 0.2


def test_a_thread_wakes_another(bell):
    threading.Timer(0.05, bell.ring).start()
    assert bell.wait(1e6)


def test_a_signal_is_handled_while_waiting(bell):
    class Interrupted(Exception):
        pass

    def handler(*_):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupted):
            bell.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_who_rings_never_waits(bell):
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()
    assert bell.wait(60)


@linux_only
def test_a_process_wakes_another(bell):
    process = os.getpid()
    child = os.fork()
    if child == 0:
        Ringer.of(process, bell.descriptor).ring()
        os._exit(0)
    assert bell.wait(60)
    os.waitpid(child, 0)


@linux_only
def test_what_is_forgotten_is_closed_and_rung_in_vain():
    before = len(os.listdir("/proc/self/fd"))
    bell = Bell()
    ringer = Ringer.of(os.getpid(), bell.descriptor)
    del bell
    gc.collect()
    ringer.ring()
    del ringer
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError):
        Ringer.of(os.getpid(), 10**6)
