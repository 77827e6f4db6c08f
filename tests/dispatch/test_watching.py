"""Real runs, really watched: found by itself, killed, stopped, recorded, stalled. Outcomes and order only."""

import contextlib
import json
import re
import signal
import time

import processes
import psutil
import pytest
from processes import SMALL, TEXT

from rpc_pipe.boards import run_folders
from rpc_pipe.boards.run_boards import RunBoards, headers_in
from rpc_pipe.boards.view import View
from rpc_pipe.dispatch.rows import worker_rows
from rpc_pipe.tracing.lost_time import lost_time

TRAIN = ["--workers", "2", *SMALL, *TEXT]

SCRIPT = """
import os, sys, time
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

class Layer(nn.Linear):
    calls = 0
    def forward(self, x):
        Layer.calls += 1
        if os.environ.get("RANK", "1") == "1" and Layer.calls == 30 and "stall" in sys.argv:
            time.sleep(4)
        return super().forward(x)

layers = [partial(Layer, 4, 4) for _ in range(2)]
alone = None if "RANK" in os.environ else 2
pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, training=Training(partial(torch.optim.SGD, lr=0.1)),
                num_workers=alone)
x = torch.ones(8, 4)
for _ in range(int(sys.argv[1])):
    pipe.step((x, x))
    time.sleep(0.02)
pipe.barrier()
"""

#: the command line, which tells of a stall after 1.5 s
IMPATIENT = """
import sys
from rpc_pipe.commands.main import main
from rpc_pipe.boards import view

view._STALL_S = 1.5
if __name__ == "__main__":
    sys.exit(main())
"""


def start(*arguments):
    return processes.start("-m", "rpc_pipe", *arguments)


def watch(*arguments, timeout=60):
    done = start("watch", *arguments)
    out, err = done.communicate(timeout=timeout)
    return done.returncode, out, err


@contextlib.contextmanager
def training(*arguments):
    """A run, its workers' boards in sight."""
    with start("run", *arguments) as run:
        folder = run_folders.root() / f"run-{run.pid}"
        try:
            deadline = time.monotonic() + 60
            while len(headers_in(folder)) < 2 and time.monotonic() < deadline and run.poll() is None:
                time.sleep(0.05)
            yield run, folder
        finally:
            run.kill()


def until(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def step_of(folder):
    return RunBoards(folder).look().lives[0].step


def until_step(folder, step):
    until(lambda: step_of(folder) >= step)


def test_watchers_that_are_killed_or_stopped_change_nothing():
    arguments = [*TRAIN, "--json", "--steps", 40]
    with start("run", *arguments) as alone:
        expected = json.loads(alone.communicate(timeout=120)[0])
    with training(*arguments) as (run, _):
        name, stopped = f"run-{run.pid}", start("watch", f"run-{run.pid}")
        time.sleep(0.2)
        stopped.send_signal(signal.SIGSTOP)
        for i in range(2):
            watcher = start("watch", name)
            time.sleep(0.1 + 0.1 * i)
            watcher.kill()
            watcher.communicate()
        out, _ = run.communicate(timeout=120)
        stopped.kill()
        stopped.communicate()
    assert run.returncode == 0
    watched = json.loads(out)
    for key in ("loss", "steps"):
        assert watched[key] == expected[key]
    assert not (run_folders.root() / name).exists()


def test_a_run_is_found_shown_and_traced(tmp_path):
    script = tmp_path / "train.py"
    short = "from rpc_pipe.boards import board\nboard.MOST_BYTES = 2**17\n"
    script.write_text(short + SCRIPT.replace("0.02", "0.002"))
    with training(script, "--workers", 2, "--", 100000) as (run, folder):
        name = folder.name
        until_step(folder, 3)
        code, out, err = watch(name, "--once")
        assert code == 0 and "1f1b on 2 workers" in out and "worker" in out, out + err
        assert watch(str(run.pid), "--once", "--json")[0] == 0
        state = json.loads(watch(str(folder), "--once", "--json")[1])
        assert state["num_workers"] == 2 and state["lost"]["sentence"]
        for ahead in (200, 600, 2000):  # on a busy machine a watcher starts slowly
            first = step_of(folder) + ahead
            code, out, err = watch(name, "--trace", tmp_path / "t.json", "--steps", f"{first}-{first + 2}")
            if code == 0:
                break
            assert "is over" in err or "is not there" in err, err
        assert code == 0 and "clocks of workers agree within" in out, out + err
        trace = json.loads((tmp_path / "t.json").read_text())
        assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"} == {first, first + 1, first + 2}
        assert trace["otherData"] == {"clock_error_ms": 0.0}
        until_step(folder, 500)  # a short board keeps fewer
        code, _, err = watch(name, "--trace", tmp_path / "t.json", "--steps", "1-2")
        assert code == 2 and "--steps 1-2: step 1 is over; the earliest still there is" in err
        watcher = start("watch", name)
        assert "ms/step" in watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        out, err = watcher.communicate(timeout=30)
        assert watcher.returncode == 0 and f"no longer watching {name}" in out, out + err
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
    assert not folder.exists()


def test_a_stall_is_told_with_the_culprit_and_its_stacks(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    told_soon = tmp_path / "impatient.py", "run"
    with processes.start(*told_soon, tmp_path / "train.py", "--workers", 2, "--", 20, "stall") as run:
        out, err = run.communicate(timeout=120)
    assert run.returncode == 0, out + err
    told = out[out.index("nothing has finished") :]
    assert "worker 0 waiting for 1B" in told
    assert "worker 0 -> worker 1: everybody waits for worker 1, which is running 1F" in told
    assert re.search(r'train.py", line \d+ in forward', told) and "_send_all" not in told
    assert "20 steps on 2 workers" in told and "costs most: " in told


def test_a_program_alone_can_be_watched_and_leaves_nothing(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with processes.start(tmp_path / "train.py", 120) as run:
        folder = run_folders.root() / f"run-{run.pid}"
        deadline = time.monotonic() + 60
        while len(headers_in(folder)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        code, out, err = watch(folder.name, "--once")
        assert code == 0 and "1f1b on 2 workers" in out, out + err
        assert run.wait(60) == 0
    assert not list(run_folders.root().glob(f"{folder.name}*"))  # other runs may go on


def test_workers_of_another_machine_are_seen_through_rpc(tmp_path):
    """Two machines that share nothing but the network: a folder each, a worker each."""
    (tmp_path / "train.py").write_text(SCRIPT)
    port, workers = processes.free_port(), []
    for rank in range(2):
        folder = tmp_path / f"machine-{rank}"
        folder.mkdir()
        variables = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, run_folders.FOLDER: folder, "RPC_PIPE_INTERFACE": "lo",
        }  # fmt: skip
        workers.append(processes.start(tmp_path / "train.py", 120, **{k: str(v) for k, v in variables.items()}))
    try:
        view, boards = View(), RunBoards(tmp_path / "machine-0")
        deadline = time.monotonic() + 60
        while len(view.complete_steps(0)) < 5 and time.monotonic() < deadline:
            view.take(boards.look())
            time.sleep(0.2)
        assert len(worker_rows(view)) == 2 and len(view.complete_steps(0)) >= 5 and lost_time(view) is not None
        assert worker_rows(view)[1].state in ("runs", "waits", "between") and 0 < view.latest.clock_error_ms < 1000
        assert len(headers_in(tmp_path / "machine-1")) == 1  # nobody looks there, so nothing is mirrored
        assert [run.wait(60) for run in workers] == [0, 0]
    finally:
        for run in workers:
            run.kill()
            run.communicate()


def test_what_a_killed_run_left_is_swept(tmp_path):
    with training(*TRAIN, "--steps", 100000) as (run, folder):
        workers = [header["process"] for header in headers_in(folder).values()]
        killed = psutil.Process(run.pid).children(recursive=True)
        for worker in killed:  # or they would remove it
            worker.suspend()
        assert folder.exists()
        run.kill()
        for worker in killed:
            worker.kill()
        run.communicate()
        until(lambda: not any(map(run_folders.alive, workers)))
        run_folders.sweep()  # unless the run of another test has done so
        assert not folder.exists()


@pytest.mark.parametrize("arguments, text", [
    (["no-such-run"], "watch no-such-run: there is no such run; "),
    (["--json"], "--json: needs --once"),
    (["--steps", "3-1", "--trace", "x"], "--steps 3-1: must be a step or a range that ascends"),
    (["--steps", "3"], "--steps 3: needs --trace FILE"),
    (["--once", "--web"], "--web 8800: has no effect with --once"),
    (["--trace", "/dev/null/t.json"], "--trace /dev/null/t.json: /dev/null is a file, not a folder"),
])  # fmt: skip
def test_wrong_input_is_told(arguments, text):
    code, _, err = watch(*arguments)
    assert code == 2 and text in err
