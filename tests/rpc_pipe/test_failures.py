"""The first cause of what goes wrong, and what is left after it."""

import io
import os
import re
import resource
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
from processes import ROOT, python, rpc_pipe, start
from refusals import refused
from torch import nn
from training_options import pipeline_with

from rpc_pipe.boards import run_folders
from rpc_pipe.boards.board import Live, State
from rpc_pipe.checkpoints import writing
from rpc_pipe.dependency import F, NotFinite, PipeError, Stalled, WorkerFailure
from rpc_pipe.launching import worker_process
from rpc_pipe.launching.causes import of_death, of_stall
from rpc_pipe.launching.report import Reporter
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.workers.thread_pool import ThreadPool

RUNNING = Live(State.RUNNING, 3, F(1, 2), since_ns=5 * 10**9)


class Faulty(nn.Module):
    """Does something at its third forward."""

    def __init__(self, does):
        super().__init__()
        self.does, self.calls = does, 0

    def forward(self, x):
        self.calls += 1
        return self.does(x) if self.calls == 3 else x


def training(does, **more):
    layers = [partial(nn.Linear, 4, 4), partial(Faulty, does), partial(nn.Linear, 4, 2)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipe = pipeline_with(layers, nn.functional.cross_entropy, num_microbatches=4, optimizer=sgd, num_workers=3, **more)
    return pipe, (torch.randn(8, 4), torch.arange(8) % 2)


def raising(error):
    def does(x):
        raise error

    return does


@pytest.mark.parametrize(
    "error", [SystemExit(3), StopIteration("done"), GeneratorExit(), ArithmeticError("no")], ids=repr
)
def test_whatever_a_model_raises_is_named_with_place_and_shapes(error):
    """SystemExit had no cause; StopIteration, which ends iterators, lost action and step."""
    pipe, batch = training(raising(error))
    with pytest.raises(WorkerFailure) as raised:
        pipe.step(batch)
    assert str(raised.value).startswith(f"worker 1 failed (running 1F2, step 1): {type(error).__name__}")
    # The first step was step 0 here, and step 1 in `on_step` and in the script's own lines.
    assert (raised.value.worker, raised.value.action, raised.value.step) == (1, "1F2", 1)
    assert raised.value.place == "stage 1, microbatch 2, given float32[2, 4]"
    assert "in does" in raised.value.remote_traceback
    pipe.close()


def test_a_layer_that_calls_its_own_pipeline_is_told_so():
    """Between processes all waited in vain, and a lost message was blamed."""
    pipe, batch = training(lambda x: pipe.actors[1].run(None))
    with refused("pipeline", WorkerFailure):
        pipe.step(batch)
    pipe.close()


class Noted(ArithmeticError):
    """An error of a user's who has other notes."""

    __notes__ = 5


def test_an_error_that_takes_no_notes_is_named_all_the_same():
    """A TypeError of ours took its place, as its notes were no list."""
    pipe, batch = training(raising(Noted("no")))
    with pytest.raises(WorkerFailure, match=r"worker 1 failed \(running 1F2, step 1\): .*Noted: no"):
        pipe.step(batch)
    pipe.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_script_alone_that_hangs_is_told_who_does(streamed):
    """Workers of a process wait for each other's locks, not for payloads: `stall_s` never fired. And `train` told only
    that something had hung."""
    pipe, batch = training(lambda x: time.sleep(2) or x, stall_s=0.6)
    with refused("worker", Stalled) as raised:
        next(pipe.train([batch])) if streamed else pipe.step(batch)
    assert "time.sleep(2)" in str(raised.value)
    with refused("worker", PipeError):
        pipe.step(batch)


def test_ctrl_c_waits_for_a_worker_that_hangs_no_longer_than_others_do(monkeypatch, caplog):
    """It was waited for without a deadline."""
    ended = threading.Event()
    pipe, batch = training(lambda x: ended.wait(20) and x, stall_s=0.3)
    monkeypatch.setattr(ThreadPool, "_await", lambda *_: time.sleep(0.3) or raising(KeyboardInterrupt())(0))
    with pytest.raises(KeyboardInterrupt):
        pipe.step(batch)
    assert "interrupted, but worker 1 hangs: running 1F2" in caplog.text
    with refused("worker", PipeError):
        pipe.step(batch)
    ended.set()


@pytest.mark.parametrize("policy", ["stop", "warn", "ignore"])
def test_a_loss_that_is_not_finite_stops_unless_told_otherwise(policy, monkeypatch, caplog):
    """NaN weights were saved, with exit code 0."""
    monkeypatch.setenv("RPC_PIPE_NAN", policy)
    pipe, batch = training(lambda x: x * float("nan"))
    if policy == "stop":
        with refused("step", NotFinite):
            pipe.step(batch)
    else:
        pipe.step(batch)
        assert [record.message for record in caplog.records] == ["step 1: the loss is nan"] * (policy == "warn")
    pipe.close()


def test_deaths_are_told_with_what_is_known_of_them():
    plain = partial(of_death, "worker 1", live=RUNNING, lines=[])
    assert plain(code=-9).text.startswith("worker 1 was killed by signal 9 (SIGKILL) while running 1F2, step 3; the ")
    assert plain(code=-6, live=None).text == "worker 1 was killed by signal 6 (SIGABRT)"
    assert plain(code=3, lines=["ValueError: bad"]).text.endswith("step 3\nit printed last:\n  ValueError: bad")
    assert plain(code=0, lines=["done"]).text.endswith(
        "with exit code 0 while running 1F2, step 3; it may call os._exit or sys.exit"
    )
    assert "--max-restarts" in plain(code=-9, early=True).text, "--elastic was taken to count from the start"


def test_a_stall_names_who_hangs_and_not_who_waits():
    waiting = Live(State.WAITING, 3, F(2, 2), F(1, 2), 1)
    lives, told = {1: RUNNING, 2: waiting}, "worker 2: nothing arrived"
    cause = of_stall(told, 1, lives, ["  roll call", "Thread 1"], 9 * 10**9)
    assert cause.title == "worker 1 hangs" and "worker 1 hangs: running 1F2, step 3 for 4 s" in cause.text
    assert "  roll call" in cause.text and told in cause.text and "Thread 1" in cause.text
    stopped = of_stall(told, 1, {**lives, 1: RUNNING._replace(state=State.STOPPED)}, [], 0)
    assert stopped.title == "worker 1 is stopped"
    assert of_stall(told, 2, {2: waiting}, [], 0).title == "worker 1 has not begun"
    assert of_stall(told, None, {}, [], 0).text == told
    # One of those that had waited for as long was on its way out, and "hangs: leaving for 0 s" was told of it.
    leaving = Live(State.LEFT, 0)
    assert of_stall(told, 1, {**lives, 1: leaving}, [], 0).title == "no worker goes on"


def test_a_run_folder_that_was_cut_off_by_full_memory_is_no_end(tmp_path, monkeypatch):
    """An empty file of the launcher's made every `run` and `watch` fail, until somebody removed it by hand."""
    monkeypatch.setattr(run_folders, "root", lambda: tmp_path)
    cut = tmp_path / "run-1"
    cut.mkdir()
    (cut / run_folders.LAUNCHER).touch()
    run_folders.sweep()
    assert cut.is_dir()  # it may be starting
    os.utime(cut, (0, 0))
    run_folders.sweep()
    assert not cut.exists()


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_output_that_cannot_be_written_does_not_end_training(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    reporter = Reporter()
    for _ in range(3):
        reporter.line([0], "a line")
        reporter.handle({"kind": "text", "text": "some"})
    reporter.failure("title", "text", [])
    assert reporter.exit_code == 0


def test_logs_are_bounded_and_few(tmp_path, monkeypatch):
    monkeypatch.setenv(worker_process.LOGS, str(tmp_path / "logs"))
    monkeypatch.setattr(worker_process, "_MOST_BYTES", 10)
    for number in range(12):
        (tmp_path / "logs" / f"run-x{number}").mkdir(parents=True)
    kept = worker_process.Logs(2)
    kept.write(1, b"0123456")
    kept.write(1, b"789abcdef")
    kept.close(keep=True)
    assert (kept.folder / "worker-1.log").read_bytes() == b"0123456789\n[no more is kept]\n"
    assert len(list((tmp_path / "logs").iterdir())) == worker_process._KEPT
    gone = worker_process.Logs(1)
    gone.close(keep=False)
    assert not gone.folder.exists()


SCRIPT = """
import os, sys, time
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

class Faulty(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 15 and os.environ["RPC_PIPE_RESTARTS"] == "0" and "exit" in sys.argv:
            os._exit(0)
        return x

layers = [partial(nn.Linear, 4, 4), Faulty, partial(nn.Linear, 4, 2)]
sgd = partial(torch.optim.SGD, lr=0.1)
pipe = Pipeline(layers, nn.functional.cross_entropy, num_microbatches=4, training=Training(sgd))
draw = torch.Generator().manual_seed(0)
for step in range(int(sys.argv[1])):
    loss = pipe.step((torch.randn(8, 4, generator=draw), torch.randint(2, (8,), generator=draw)))
    if pipe.stopped:
        break
    if step == 1 and pipe.worker == 0:
        print("training", flush=True)
    time.sleep(float(sys.argv[2]))
if pipe.worker == 0:
    print("loss", loss.hex())
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    return lambda *options, of_script: [
        "run", script, "--workers", 2, "--transport", "zmq", *options, "--", *of_script
    ]  # fmt: skip


def undisturbed(steps):
    """Return the loss that the script should end with."""
    torch.manual_seed(0)
    layers = [partial(nn.Linear, 4, 4), nn.Identity, partial(nn.Linear, 4, 2)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipe = Pipeline(layers, nn.functional.cross_entropy, num_microbatches=4, training=Training(sgd), num_workers=2)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss = pipe.step((torch.randn(8, 4, generator=draw), torch.randint(2, (8,), generator=draw)))
    pipe.close()
    return loss.hex()


def test_a_failed_run_starts_again_from_its_own_checkpoint_and_ends_alike(tmp_path, run):
    folder = tmp_path / "checkpoints"
    (folder / "step-00000099").mkdir(parents=True)  # of another run
    (folder / "step-00000099" / "manifest.json").touch()
    options = "--checkpoint-every", 2, "--checkpoint-folder", folder, "--max-restarts", 1
    done = rpc_pipe(*run(*options, of_script=(6, 0.1, "exit")), RPC_PIPE_LOGS=str(tmp_path / "logs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"loss (0x\S+)", done.stdout)[1] == undisturbed(6)
    assert "worker 0 ended with exit code 0 while running 0F2, step 4" in done.stdout
    assert "starting again (1 of 1)" in done.stdout
    assert re.search(r"goes on from \S+/step-00000002, after 2 steps", done.stdout)


ALWAYS = """
import torch
from rpc_pipe import Pipeline, Training
pipe = Pipeline([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], torch.nn.functional.mse_loss, num_microbatches=2)
for step in range(4):
    if step == 1 and pipe.worker == 1:
        raise ArithmeticError("always here")
    pipe.step((torch.ones(4, 2), torch.ones(4, 2)))
"""


def test_a_run_that_fails_alike_each_time_stops_and_says_so(tmp_path):
    """The last attempt ended as any other failure does, without a word of the attempts before it."""
    (tmp_path / "train.py").write_text(ALWAYS)
    options = "--checkpoint-every", 1, "--max-restarts", 2
    done = rpc_pipe("run", "train.py", "--workers", 2, *options, cwd=tmp_path, RPC_PIPE_LOGS="off")
    assert done.returncode == 1 and done.stdout.count("starting again (") == 2, done.stdout + done.stderr
    assert "not starting again: 3 attempts have failed" in done.stdout


DAMAGE = """
import os, signal, sys
from pathlib import Path
import torch
from rpc_pipe import Pipeline, Training
torch.manual_seed(0)
pipe = Pipeline(
    [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)], torch.nn.functional.mse_loss,
    training=Training(lambda p: torch.optim.SGD(p, lr=0.1)), num_microbatches=2, num_workers=int(sys.argv[1]),
)
for step in range(4):
    if step == 3 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        pipe.checkpoints.save("other")  # which waits for the one before
        if pipe.worker == 1:
            (part,) = Path("checkpoints/step-00000003").glob("optimizer-00001*")
            part.write_bytes(part.read_bytes()[:-1])
            os.kill(os.getpid(), signal.SIGKILL)
    loss = pipe.step((torch.full((8, 4), step / 4), torch.ones(8, 2)))
print("loss", loss.hex())
"""


def test_torchrun_starts_again_from_an_older_checkpoint_where_the_newest_is_damaged(tmp_path):
    """Over RPC the workers of the second attempt met, most times, at the addresses of those that were gone."""
    script = tmp_path / "train.py"
    script.write_text(DAMAGE)
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", 2, "--max-restarts", 1
    run = "-m", "rpc_pipe", "run", script, "--checkpoint-every", 1
    done = python(*torchrun, *run, "--", 2, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert re.search(r"damaged: .*step-00000003.*: it was cut off; goes on from .*step-00000002, after 2 steps", said)
    alone = python(script, 1, cwd=tmp_path, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    assert set(re.findall("loss 0x.*", done.stdout)) == set(re.findall("loss 0x.*", alone.stdout)) != set(), said


def test_a_closed_terminal_stops_the_run_in_good_order(tmp_path, run):
    weights, temporary = tmp_path / "w.safetensors", tmp_path / "temporary"
    temporary.mkdir()
    arguments = run("--save", weights, of_script=(10**6, 0.01))
    with start("-m", "rpc_pipe", *arguments, TMPDIR=str(temporary)) as launcher:
        while "training" not in (line := launcher.stdout.readline()):
            assert line
        launcher.send_signal(signal.SIGHUP)
        output = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 128 + signal.SIGHUP, output
    assert weights.is_file() and list(temporary.iterdir()) == []


LOADING = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from rpc_pipe.pipeline import Pipeline

class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, row):
        if row == 40:
            raise ArithmeticError("a row's own fault")
        return torch.ones(4), torch.ones(4)

pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, num_microbatches=2)
for loss in pipe.train(DataLoader(Rows(), 8, num_workers=1)):
    pass
"""


def test_processes_that_load_data_leave_nothing_when_one_fails(tmp_path):
    """Workers that are killed remove nothing: folders of multiprocessing stayed in TMPDIR."""
    script, temporary = tmp_path / "train.py", tmp_path / "tmp"
    script.write_text(LOADING)
    temporary.mkdir()
    done = rpc_pipe("run", script, TMPDIR=str(temporary))
    assert done.returncode == 1 and "ArithmeticError: a row's own fault" in done.stdout, done.stdout
    assert list(temporary.iterdir()) == []


def test_a_worker_without_descriptors_says_that_it_writes_no_checkpoint(tmp_path):
    """Worker 0 waited for its list for `stall_s`, and another one was said to hang."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        writing._give_up(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with refused("checkpoint", Stalled):
        writing._awaited(tmp_path / writing._part(1), time.monotonic(), 5)


def test_an_error_is_told_though_a_script_has_cleared_the_environment(tmp_path):
    """It was told as "ended with exit code 1 while starting up"."""
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ.clear()\nraise ArithmeticError('mine')\n")
    done = rpc_pipe("run", script)
    assert done.returncode == 1 and "ArithmeticError: mine" in done.stdout.partition("──")[2], done.stdout
