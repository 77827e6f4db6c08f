"""Wakeups, between threads and between processes."""

import contextlib
import gc
import os
import signal
import threading
import time

import pytest
from processes import python

from rpc_pipe.workers.transport.local import ThreadWakeup, local_carriers
from rpc_pipe.workers.transport.wakeup import Notifier, Wakeup

linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="for Linux")


@pytest.fixture(params=[Wakeup, ThreadWakeup])
def wakeup(request):
    return request.param()


def test_a_notice_before_the_wait_is_not_lost(wakeup):
    wakeup.notify()
    assert wakeup.wait(60)


def test_many_notices_end_one_wait(wakeup):
    for _ in range(3):
        wakeup.notify()
    assert wakeup.wait(60)
    assert not wakeup.wait(0.01)


def test_no_notice_no_wake(wakeup):
    assert not wakeup.wait(0)
    assert not wakeup.wait(0.01)


def test_a_wait_has_its_own_deadline_whatever_those_before_had(wakeup):
    wakeup.notify()
    assert wakeup.wait(1e6)
    began = time.monotonic()
    assert not wakeup.wait(0.2)
    assert time.monotonic() - began >= 0.2


def test_a_thread_wakes_another(wakeup):
    threading.Timer(0.05, wakeup.notify).start()
    assert wakeup.wait(1e6)


def test_a_signal_is_handled_while_waiting(wakeup):
    class Interrupted(Exception):
        pass

    def handler(*_):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupted):
            wakeup.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_who_notifies_never_waits(wakeup):
    for _ in range(100_000):  # more than a pipe holds
        wakeup.notify()
    assert wakeup.wait(60)


@linux_only
def test_a_process_wakes_another():
    wakeup, process = Wakeup(), os.getpid()
    child = os.fork()
    if child == 0:
        Notifier.of(process, wakeup.descriptor).notify()
        os._exit(0)
    assert wakeup.wait(60)
    os.waitpid(child, 0)


def descriptors(kind):
    """Count this process's descriptors of a kind, as the kernel names it."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}") == kind
    return found


@linux_only
def test_workers_that_are_threads_take_no_descriptors():
    """Forgotten pipelines lie in cycles: a process that made hundreds had no descriptors left before they went."""
    before = len(os.listdir("/proc/self/fd"))
    carriers = local_carriers(100)
    assert len(carriers) == 100 and len(os.listdir("/proc/self/fd")) < before + 100


@linux_only
def test_what_is_forgotten_is_closed_and_notified_in_vain():
    gc.collect()  # other tests' carriers, or what they let go of would hide what is left here
    wakeup = Wakeup()
    kind = os.readlink(f"/proc/self/fd/{wakeup.descriptor}")
    before = descriptors(kind) - 1
    notifier = Notifier.of(os.getpid(), wakeup.descriptor)
    del wakeup
    gc.collect()
    notifier.notify()
    del notifier
    assert descriptors(kind) <= before  # those of other tests' carriers may be closed at any time, too
    with pytest.raises(OSError):
        Notifier.of(os.getpid(), 10**6)


AT_THE_END = """
import atexit
from rpc_pipe.workers.transport import wakeup
atexit.register(lambda: made.notify())  # runs after what weakref.finalize would close at the end
made = wakeup.Wakeup()
"""


def test_a_thread_that_notifies_at_the_interpreters_end_writes_to_its_own_pipe():
    """Runs that had ended well printed `OSError: Bad file descriptor`: a timer wrote to what a finalizer had closed."""
    done = python("-c", AT_THE_END, anew=True)
    assert (done.returncode, done.stderr) == (0, "")
