import threading

import pytest
from processes import python

from rpc_pipe.workers.transport.wakeup import within

ALONE = """
import os, sys
os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
from rpc_pipe.workers.transport.carrier import Carrier
from rpc_pipe.workers.transport.messages import Messages
from rpc_pipe.workers.transport.meeting import store_in
from rpc_pipe.workers.transport.rpc import RpcLink
Carrier(0, range(2), Messages(RpcLink(0, range(2), "a place", 0.5, store=store_in(sys.argv[1], 2))))
"""


def test_a_call_in_time_returns_or_raises():
    within(30, lambda: None)
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 / 0)


def test_a_call_that_does_not_return_is_left_behind():
    never = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, never.wait)
    never.set()


def test_workers_that_do_not_come_are_not_waited_for_longer_than_was_said(tmp_path):
    """torch waits half an hour for them, whatever its options say."""
    done = python("-c", ALONE, tmp_path / "meet")
    assert "worker 0 could not meet the other 1 workers" in done.stderr and "within 0:00:00.5" in done.stderr
