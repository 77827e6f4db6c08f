"""Real processes over RPC, as a user starts them. Outcomes and order only; every wait has a deadline."""

import json
import re
import signal
import socket
import time
from contextlib import contextmanager

import psutil
import pytest
from processes import SMALL, TEXT, python, rpc_pipe, start, unmerged

from rpc_pipe.workers.transport.shared_memory import POSSIBLE

SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

class Faulty(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 7 and "fail" in sys.argv:
            raise ArithmeticError("the model's own fault")
        return x

layers = [partial(nn.Linear, 4, 4), nn.Tanh, Faulty, partial(nn.Linear, 4, 2)]
sgd = partial(torch.optim.SGD, lr=0.1)
pipe = Pipeline(layers, nn.functional.cross_entropy, num_microbatches=4, training=Training(sgd))
x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
for _ in range(int(sys.argv[1])):
    loss = pipe.step((x, y))
pipe.barrier()
assert len(pipe.actors[0].carrier.outbox) == 0
print(f"{loss:.6f} {pipe.predict(x).shape[0]}\\n", end="")  # in one piece: others write too
"""


@contextmanager
def training(workers):
    """A launcher whose workers have begun to train, and the workers."""
    arguments = ["run", *SMALL, *TEXT, "--workers", workers, "--steps", 100000]
    with start("-m", "rpc_pipe", *arguments, merged=True) as launcher:
        try:
            lines = []
            while "step 1/" not in "".join(lines):
                lines.append(launcher.stdout.readline())
                assert lines[-1], lines
            yield launcher, psutil.Process(launcher.pid).children()
        finally:
            launcher.kill()


def assert_all_gone(processes, timeout=10):
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    for process in alive:
        process.kill()
    assert not alive


def test_verify_over_rpc_is_identical():
    done = rpc_pipe("verify", "--schedule", "1f1b", "--workers", 3, "--microbatches", 5, "--steps", 3, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] and report["max_abs_error"] == 0 and report["workers"] == 3


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_shared_memory_changes_nothing_but_the_way(tmp_path, wanted):
    script = tmp_path / "train.py"
    # what has been read, as a worker that leaves takes its channels with it
    readers = "getattr(pipe.actors[0].carrier.post.channels, '_readers', ())"
    came = f"[peer for peer, _, counters in {readers} if counters[0]]"
    script.write_text(SCRIPT + f"print('came by shared memory from', sorted({came}))")
    done = rpc_pipe("run", script, "--workers", 3, "--", 3, RPC_PIPE_SHARED_MEMORY=wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert unmerged(done.stdout).count("0.773034 8") == 3, done.stdout
    if POSSIBLE:
        assert ("came by shared memory from [0, 2]" in done.stdout) == (wanted == "on"), (
            done.stdout
        )  # worker 1's neighbours


def test_the_main_job_trains_saves_and_tells(tmp_path):
    from safetensors.torch import load_file

    done = rpc_pipe(
        "run", *SMALL, *TEXT, "--steps", 5, "--json",
        "--save", tmp_path / "w.safetensors", "--trace", tmp_path / "t.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["steps"] == 5 and 0 < summary["loss"] < 6
    assert 0 < summary["bubble_planned"] < 1 and 0 < summary["bubble_actual"] < 1
    assert summary["tokens_per_s"] > 0 and summary["step_ms"] > 0
    assert "step 5/5" in done.stderr
    names = list(load_file(tmp_path / "w.safetensors"))
    assert "0.token.weight" in names and "3.logits.weight" in names
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert lanes == {"worker 0 · stage 0 · cpu", "worker 1 · stage 1 · cpu"}
    ran = [e for e in events if e["ph"] == "X"]
    assert len(ran) == 5 * (2 * 2 * 4 + 2)
    ends = {(e["args"]["step"], e["name"]): e["ts"] + e["dur"] for e in ran}
    for e in ran:  # clocks are aligned: nothing starts before what it needs has ended
        if e["name"].startswith("1F"):
            assert e["ts"] >= ends[e["args"]["step"], e["name"].replace("1F", "0F")]


def test_one_script_alone_and_launched_gives_one_loss(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = python(script, 3, OMP_NUM_THREADS="1")
    launched = rpc_pipe("run", script, "--workers", 3, "--", 3)
    for done in (alone, launched):
        assert done.returncode == 0, done.stdout + done.stderr
    expected = alone.stdout.strip()
    assert re.fullmatch(r"\d\.\d{6} 8", expected)
    printed = unmerged(launched.stdout).splitlines()
    told = [line for line in printed if line.startswith("worker ")]  # the summary may come before another's last line
    assert sorted(told) == [f"worker {w} | {expected}" for w in range(3)]
    assert [line.partition(":")[0] for line in printed if line.startswith(("3 steps", "costs most"))] == [
        "3 steps on 3 workers",
        "costs most",
    ]


def test_a_schedule_of_ones_own_runs_from_its_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rpc_pipe.dependency import B, F, Spec\n"
        "class Mine(Spec):\n"
        "    lag: int = 1\n"
        "    def after(self, a):\n"
        "        return [B(a.stage, a.microbatch - self.num_stages - self.lag)] if a.kind is F else []\n"
    )
    done = rpc_pipe("verify", "--schedule", f"{file}:Mine", "--set", "lag=2", "--workers", 2, "--steps", 3, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["identical"], done.stdout + done.stderr


def test_a_workers_exception_reaches_the_console_first(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = rpc_pipe("run", script, "--workers", 4, "--", 3, "fail")
    assert done.returncode == 1
    # A slow start has a line on the model before.
    first, second = [line for line in done.stdout.splitlines() if "failed" in line][:2]
    assert "worker 2 failed" in first
    assert (
        second == "worker 2 failed (running 2F2, step 2): ArithmeticError: the model's own fault, in layer 2 (Faulty)"
    )
    assert "in forward" in done.stdout and str(script) in done.stdout


def test_kill_9_of_a_worker_ends_all_and_names_it():
    with training(workers=3) as (launcher, workers):
        by_rank = sorted(workers, key=lambda worker: (worker.create_time(), worker.pid))
        by_rank[1].send_signal(signal.SIGKILL)
        output = launcher.communicate(timeout=10)[0]
        assert launcher.returncode == 1
        assert re.search(r"worker 1 was killed by signal 9 \(SIGKILL\) while .*step \d+", output), output
        assert_all_gone(workers)


def test_kill_9_of_the_launcher_leaves_no_process():
    with training(workers=2) as (launcher, workers):
        launcher.kill()
        launcher.wait()
        assert len(workers) == 2
        assert_all_gone(workers)


def test_a_stopped_worker_ends_with_its_launcher_and_so_do_its_children(tmp_path):
    """A worker that Ctrl-Z, SIGSTOP or a debugger had stopped outlived `kill -9` of the launcher: its thread that waits
    for the launcher's end was stopped, too."""
    script = tmp_path / "train.py"
    script.write_text("import os, time\nchild = os.fork()\nif child: print('loads', child)\ntime.sleep(600)")
    with start("-m", "rpc_pipe", "run", script, "--workers", 2, merged=True) as launcher:
        try:
            for _ in range(2):
                assert "loads" in launcher.stdout.readline()
            processes = psutil.Process(launcher.pid).children(recursive=True)
            for process in processes:
                process.suspend()
        finally:
            launcher.kill()
    assert len(processes) == 4
    assert_all_gone(processes)


HANGING = """
import os, time
import torch
from torch import nn
from rpc_pipe import Pipeline

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        if os.environ["RANK"] == "1":
            time.sleep(60)  # it hangs here
        for block in self.blocks:
            x = block(x)
        return x

pipe = Pipeline(Net(), nn.functional.mse_loss, num_microbatches=2, stall_s=1)
pipe.step((torch.ones(4, 4), torch.ones(4, 4)))
"""


def test_a_worker_that_hangs_in_the_first_forward_is_named_with_its_stacks(tmp_path):
    """Until its model was cut a worker showed nothing: it "had made no pipeline yet", and another one's stacks were
    shown."""
    script = tmp_path / "train.py"
    script.write_text(HANGING)
    done = rpc_pipe("run", script, "--workers", 2)
    assert "worker 1 hangs" in done.stdout and "stacks of worker 1" in done.stdout, done.stdout
    assert "frozen runpy" not in done.stdout
    assert f'{script}", line {HANGING[: HANGING.index("time.sleep")].count(chr(10)) + 1} in forward' in done.stdout


SKIPPING = """
import os, sys, time
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline

resumed = "resumed" in sys.argv
layers = [partial(nn.Linear, 2, 2), nn.Tanh]
pipe = Pipeline(layers, nn.functional.mse_loss, training=None, num_microbatches=2)
x, rank, steps = torch.ones(4, 2), int(os.environ["RANK"]), 99
for step in range(steps):
    if resumed:
        time.sleep(0 if rank else 0.2)  # a worker reads more slowly than the other
    pipe.step((x, x))
    print("step", pipe.steps_done)
    if pipe.stopped:
        break
print("ends after", pipe.steps_done, pipe.evaluate((x, x)) and "evaluated")
"""


def test_ctrl_c_stops_a_script_that_skips_its_batches(tmp_path):
    """A stop was looked for by steps that are computed alone: a script that read 300 batches to skip them went on for
    half a minute, and SIGTERM ended in a kill."""
    script = tmp_path / "train.py"
    script.write_text(SKIPPING)
    arguments = ["run", script, "--workers", 2, "--checkpoint-every", 99]
    assert rpc_pipe(*arguments, cwd=tmp_path).returncode == 0
    how = [*arguments, "--resume", "auto", "--", "resumed"]
    output = interrupted_after_step_3(*how, by=signal.SIGUSR1, cwd=tmp_path)  # which killed the launcher
    assert "| step 90" not in output, "it read all batches"
    assert unmerged(output).count("ends after 99 evaluated") == 2, output


def interrupted_after_step_3(*arguments, by=signal.SIGINT, **options):
    """Return the output of a run whose launcher gets a signal, Ctrl-C, once worker 0 has printed `step 3`."""
    with start("-m", "rpc_pipe", *arguments, merged=True, **options) as launcher:
        try:
            while "| step 3\n" not in (line := launcher.stdout.readline()) or "worker 1" in line:
                assert line
            launcher.send_signal(by)
            output = launcher.communicate(timeout=60)[0]
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + by, output
    return output


STOPPABLE = """
import sys
from torch import nn
from rpc_pipe import Pipeline

pipe = Pipeline([nn.Linear(2, 2), nn.Tanh()], nn.functional.mse_loss, num_microbatches=2)
x = nn.Parameter(nn.Linear(2, 4).weight).detach()
for step in range(10**6):
    pipe.step((x, x))
    print("step", step)
    if pipe.stopped and "ends" in sys.argv:
        break
print(pipe.evaluate((x, x)) and "evaluated")
"""


@pytest.mark.parametrize("how", ["ends", "goes on"])
def test_ctrl_c_lets_a_script_end_its_loop_and_saves_either_way(tmp_path, how):
    """`step` raised SystemExit, and what the script saves after its loop was lost."""
    script, weights = tmp_path / "train.py", tmp_path / "w.safetensors"
    script.write_text(STOPPABLE)
    output = interrupted_after_step_3("run", script, "--workers", 2, "--save", weights, "--", how)
    assert unmerged(output).count("| evaluated") == (2 if how == "ends" else 0)
    assert weights.is_file() and "Traceback" not in output


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_once_finishes_the_step_and_twice_kills(interrupts):
    with training(workers=2) as (launcher, workers):
        for _ in range(interrupts):
            launcher.send_signal(signal.SIGINT)
            time.sleep(0.01)  # two signals at once are one
        output = launcher.communicate(timeout=60)[0]
        assert launcher.returncode == 130
        assert ("stopping after this step" in output) or interrupts == 2
        assert_all_gone(workers)


def test_ctrl_c_is_heard_while_workers_flood_the_launcher(tmp_path):
    """Nobody reads what the launcher shows, so it blocks in a print; it only noted the signal and went on printing."""
    script = tmp_path / "train.py"
    script.write_text("while True: print('again ' * 100)")
    with start("-m", "rpc_pipe", "run", script, "--workers", 1, merged=True) as launcher:
        try:
            launcher.stdout.readline()
            time.sleep(0.5)  # the pipe is full
            workers = psutil.Process(launcher.pid).children()
            for _ in range(2):
                launcher.send_signal(signal.SIGINT)
                time.sleep(0.1)  # two signals at once are one
            assert launcher.wait(timeout=10) == 130
            assert_all_gone(workers)
        finally:
            launcher.kill()


def test_who_ends_before_the_others_could_meet_it_is_named(tmp_path):
    """The others waited for it, for torch's half an hour."""
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '1': sys.exit(0)\n" + SCRIPT)
    done = rpc_pipe("run", script, "--workers", 3, "--", 3, timeout=60)
    assert done.returncode == 1
    assert "worker 1 has ended without a Pipeline, but worker 0" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "arguments, more, message",
    [
        (["run", "--schedule", "1f2b"], {}, "did you mean '1f1b'"),
        (["run", "--workers", "0"], {}, "--workers 0: must be at least 1"),
        (["run", "--workers", "9"], {}, "9 stages, and 6 layers or blocks"),
        (["run", "--data", "/no/such"], {}, "--data /no/such: cannot be read: No such file"),
        (["run", "--data", "{tmp}/empty"], {}, "--data"),
        (["run", "--schedule", "{tmp}/bad.py:Mine"], {}, "raised SyntaxError"),
        (["run", "--schedule", "{tmp}/bad.py"], {}, "bad.py raised SyntaxError"),
        (["run", "--port", "{port}"], {}, "Address already in use"),
        (["run"], {"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT: not set, but RANK is"),
        (["run"], {"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK 3: must be 0 to"),
        (["run", "--steps", "1"], {"RPC_PIPE_SHARED_MEMORY": "no"}, "RPC_PIPE_SHARED_MEMORY 'no': must be on or off"),
        (["run", "--steps", "1"], {"RPC_PIPE_JOIN_TIMEOUT": "5 s"}, "RPC_PIPE_JOIN_TIMEOUT '5 s': must be a number of"),
        (["run", "no_such_script.py"], {}, "no_such_script.py: there is no such file"),
        (["run", "{tmp}/bat.py"], {}, "bat.py: there is no such file; did you mean {tmp}/bad.py?"),
        (["run", "{tmp}/bad.py:make"], {}, "there is no such file; did you mean --model {tmp}/bad.py:make?"),
        (
            ["plan", "--profile", "/no.json", "--batch", "8"],
            {},
            "error: --profile /no.json: cannot be read: No such file",
        ),
        (["run", "{tmp}/empty"], {}, "empty: is a folder; name the script in it"),
        (
            ["run", "{tmp}/bad.py", "--epochs", "2"],
            {},
            "not an option of rpc-pipe run; put the script's own options after --",
        ),
        (
            ["run", "{tmp}/bad.py", "--wokers", "2"],
            {},
            "not an option of rpc-pipe run; did you mean --workers? put the",
        ),
        (
            ["run", "{tmp}/bad.py", "--checkpoint", "x"],
            {},
            "did you mean --checkpoint-every or --checkpoint-folder or --checkpoint-keep? put the",
        ),
        (["simulate", "--link", "0-1"], {}, "--link 0-1: must be [FROM-TO=]TIME[/BANDWIDTH], such as 2.5/1MB, or 0-1="),
        (["plan", "--link", "0-1"], {}, "--link 0-1: must be [FROM-TO=]TIME[/BANDWIDTH], such as 2.5/1MB, or 0-1="),
        (["simulate", "--slow", "1"], {}, "--slow 1: must be WORKER=FACTOR, such as 1=1.5"),
        (["run", "--device", "cuda:7"], {}, "--device cuda:7"),
        (["run", "{tmp}/bad.py", "--device", "cuda:7"], {}, "--device cuda:7"),  # no worker has been started
        (["run", "--device", "gpu"], {}, "--device gpu: must be cpu, cuda or cuda:N"),
        (["simulate", "--cost", "F=1,X=2"], {}, "--cost X=2: kinds are"),
        (["simulate", "--comm", "-1"], {}, "--comm -1: must be a number of at least 0"),
        (["simulate", "--set", "chunks"], {}, "--set chunks: must be NAME=VALUE, such as chunks=2"),
        (["simulate", "--order", "redy"], {}, "--order redy: did you mean ready? known are ready, fixed"),
        (["verify", "--workers", "x"], {}, "--workers x: must be a whole number"),
    ],
)
def test_wrong_input_gets_one_clear_error_and_exit_code_2(arguments, more, message, tmp_path):
    (tmp_path / "bad.py").write_text("class Mine(:\n")
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = {"tmp": tmp_path, "port": taken.getsockname()[1]}
        done = rpc_pipe(*(text.format(**values) for text in arguments), timeout=30, **more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message.format(**values) in done.stderr
    assert "Traceback" not in done.stderr


def test_simulate_and_schedules_print_json():
    done = rpc_pipe(
        "simulate", "--schedule", "1f1b", "--workers", 4, "--microbatches", 8, "--cost", "F=1,B=2", "--json"
    )
    report = json.loads(done.stdout)
    assert report["makespan"] == 33 and report["peak_activations"] == [4, 3, 2, 1] and report["actions"] == 64
    names = [row["name"] for row in json.loads(rpc_pipe("schedules", "--json").stdout)]
    assert {"naive", "gpipe", "1f1b", "zb-v", "dualpipe"} <= set(names)
