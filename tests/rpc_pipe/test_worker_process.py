"""What the launcher reads of a worker's process, without a pipeline in it."""

import os
import queue
import sys
import time
from contextlib import contextmanager
from weakref import ref

import psutil
import pytest

from rpc_pipe.launching import launcher_link as link
from rpc_pipe.launching.worker_process import _LONGEST_LINE, MOST_UNREAD, WorkerProcess


@contextmanager
def process(code="", command=None):
    events = queue.Queue(MOST_UNREAD)
    worker = WorkerProcess(0, command or [sys.executable, "-c", code], dict(os.environ), events)
    try:
        yield worker, events
    finally:
        worker.kill()
        while events.get(timeout=30).what != "ended":
            pass


def until_the_end(events):
    """Return (what, detail) of every event up to the end of the process, and leave the end there."""
    found = []
    while not found or found[-1][0] != "ended":
        event = events.get(timeout=30)
        assert event is not None, found
        found.append((event.what, event.detail))
    events.put(event)
    return [event for event in found if event[0] != "no more"]


def test_who_cannot_be_started_leaves_no_descriptor():
    """Where there were few, the launcher had none to remove its folder with."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        WorkerProcess(0, ["/none"], dict(os.environ), queue.Queue(MOST_UNREAD))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_who_prints_faster_than_is_read_waits():
    """The launcher kept every line, without a bound."""
    with process("while True: print('again', flush=True)") as (_, events):
        for _ in range(3 * MOST_UNREAD):
            assert events.get(timeout=30).detail == "again"
        full = -1
        while events.qsize() != full:
            full = events.qsize()
            time.sleep(0.2)
        assert full == MOST_UNREAD


def test_lines_come_whole_and_in_order_before_the_end():
    with process("print('one'); print('two', end='')") as (_, events):
        assert until_the_end(events) == [("printed", "one"), ("printed", "two"), ("ended", 0)]


def test_a_line_without_end_comes_in_parts():
    with process(f"print('x' * {3 * _LONGEST_LINE}, end='')") as (_, events):
        parts = [detail for what, detail in until_the_end(events) if what == "printed"]
        assert len(parts) > 1 and "".join(parts) == "x" * 3 * _LONGEST_LINE


def test_of_a_progress_bar_the_last_state_is_shown():
    with process("print('10 %\\r50 %\\r100 %')") as (_, events):
        assert until_the_end(events)[0] == ("printed", "100 %")


def test_the_end_is_seen_though_a_child_holds_the_pipes():
    """A forked data loader outlives a worker that is killed; the launcher waited for its pipes to close."""
    code = "import os, signal, time\nif os.fork(): os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    with process(code) as (_, events):
        assert until_the_end(events) == [("ended", -9)]


def test_when_the_launcher_is_gone_so_is_what_its_workers_have_started():
    """A worker ended itself alone; its data loader's processes went on."""
    code = "import os, time\nfrom rpc_pipe.launching import launcher_link as link\n"
    code += "if child := os.fork(): link.hold_leash(); print(child, flush=True)\ntime.sleep(60)"
    with process(code) as (worker, events):
        child = psutil.Process(int(events.get(timeout=30).detail))
        worker._leash.close()  # as the system does when the launcher ends
        assert psutil.wait_procs([child], timeout=10)[1] == []
        assert until_the_end(events) == [("ended", -9)]


def test_a_pipeline_may_be_made_while_the_others_are_asked_to_stop(monkeypatch):
    class Asked:
        def request_stop(self):
            later.append(Asked())
            link._attached.append(ref(later[-1]))

    later = [Asked()]
    monkeypatch.setattr(link, "_attached", [ref(later[0])])
    monkeypatch.setattr(link, "_stop_requested", False)
    link._request_stop()
    assert len(later) == len(link._pipelines()) == 2
