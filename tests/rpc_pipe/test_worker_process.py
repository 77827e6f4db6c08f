"""What the launcher reads of a worker's process, without a pipeline in it."""

import os
import socket
import sys
import time
from contextlib import contextmanager
from weakref import ref

import psutil
import pytest

from rpc_pipe.boards import run_folders
from rpc_pipe.launching import launcher_link as link
from rpc_pipe.launching.worker_process import _LONGEST_LINE, WorkerProcess, hear


@contextmanager
def process(code):
    worker = WorkerProcess(0, [sys.executable, "-c", code], dict(os.environ))
    try:
        yield worker
    finally:
        worker.kill()
        until_the_end(worker)


def until_the_end(worker):
    """Return (what, detail) of every event up to the end of the process."""
    found = []
    while not worker.ended:
        found += [(event.what, event.detail) for event in hear([worker], 0.05)]
    return found


def test_who_cannot_be_started_leaves_no_descriptor():
    """Where there were few, the launcher had none to remove its folder with."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        WorkerProcess(0, ["/none"], dict(os.environ))
    assert len(os.listdir("/proc/self/fd")) <= len(before), "what earlier tests left may be closed meanwhile"


def test_who_prints_faster_than_is_read_waits():
    """The launcher kept every line, without a bound."""
    with process("while True: print('again', flush=True)") as worker:
        for _ in range(9):
            time.sleep(0.05)
            assert len(list(hear([worker], 30))) <= _LONGEST_LINE


def test_lines_come_whole_and_in_order_before_the_end():
    with process("print('one'); print('two', end='')") as worker:
        assert until_the_end(worker) == [("printed", "one"), ("printed", "two"), ("ended", 0)]


def test_a_line_without_end_comes_in_parts():
    with process(f"print('x' * {3 * _LONGEST_LINE}, end='')") as worker:
        parts = [detail for what, detail in until_the_end(worker) if what == "printed"]
        assert len(parts) > 1 and "".join(parts) == "x" * 3 * _LONGEST_LINE


def test_of_a_progress_bar_the_last_state_is_shown():
    with process("print('10 %\\r50 %\\r100 %')") as worker:
        assert until_the_end(worker)[0] == ("printed", "100 %")


def test_the_end_is_seen_though_a_child_holds_the_pipes():
    """A forked data loader outlives a worker that is killed; the launcher waited for its pipes to close."""
    code = "import os, signal, time\nif os.fork(): os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    with process(code) as worker:
        assert until_the_end(worker) == [("ended", -9)]


def test_when_the_launcher_is_gone_so_is_what_its_workers_have_started(tmp_path, monkeypatch):
    """A worker ended itself alone; its data loader's processes went on."""
    monkeypatch.setenv(link.FOLDER, str(tmp_path / "run-1"))
    code = "import os, time\nfrom rpc_pipe.launching import worker_main\n"
    code += "if child := os.fork(): worker_main.hold_leash(); print(child, flush=True)\ntime.sleep(60)"
    with process(code) as worker:
        while not (printed := list(hear([worker], 30))):
            pass
        child = psutil.Process(int(printed[0].detail))
        worker.pipes.pop(worker._link)
        worker._link.close()  # as the system does when the launcher ends
        assert psutil.wait_procs([child], timeout=10)[1] == []
        assert until_the_end(worker) == [("ended", -9)]


def test_a_worker_whose_link_breaks_leaves_the_folder_of_the_run(tmp_path, monkeypatch):
    """It removed what the launcher reads of all workers, so that another worker was blamed."""
    boards = tmp_path / "run-1"
    boards.mkdir()
    (boards / run_folders.LAUNCHER).write_text(run_folders.identity())  # this process lives
    monkeypatch.setenv(link.FOLDER, str(boards))
    code = "import time\nfrom rpc_pipe.launching import worker_main\n"
    code += "worker_main.LAST_WORDS_S = 0.1\nworker_main.hold_leash(); print('held', flush=True)\ntime.sleep(60)"
    with process(code) as worker:
        while not list(hear([worker], 30)):
            pass
        worker._link.shutdown(socket.SHUT_RDWR)
        assert until_the_end(worker) == [("ended", -9)]
    assert [path.name for path in boards.iterdir()] == [run_folders.LAUNCHER]


def test_a_pipeline_may_be_made_while_the_others_are_asked_to_stop(monkeypatch):
    class Asked:
        def request_stop(self):
            later.append(Asked())
            link._attached.append(ref(later[-1]))

    later = [Asked()]
    monkeypatch.setattr(link, "_attached", [ref(later[0])])
    monkeypatch.setattr(link, "_stop_requested", False)
    link.request_stop()
    assert len(later) == len(link.pipelines()) == 2
