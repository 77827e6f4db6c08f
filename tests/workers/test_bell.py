"""Bells, between threads and between processes."""

import mmap
import os
import threading

import pytest

from rpc_pipe.workers.bell import BELL_BYTES, SharedBell, ThreadBell


def shared():
    return SharedBell(mmap.mmap(-1, BELL_BYTES), new=True)


@pytest.fixture(params=[ThreadBell, shared])
def bell(request):
    return request.param()


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


def test_a_thread_wakes_another(bell):
    threading.Timer(0.05, bell.ring).start()
    assert bell.wait(60)


def test_a_process_wakes_another():
    memory = mmap.mmap(-1, BELL_BYTES)
    bell = SharedBell(memory, new=True)
    child = os.fork()
    if child == 0:
        SharedBell(memory, new=False).ring()
        os._exit(0)
    assert bell.wait(60)
    os.waitpid(child, 0)
