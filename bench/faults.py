"""Random faults, one after the other: whether the first cause is named, how soon, and whether anything is left.

    python bench/faults.py [--count 10] [--seed 0] [--transport zmq] [--only "kill; hang"]

Each fault hits a training of three workers: something in a worker's own forward or backward, or a signal from outside.
A fault counts as right if the block on the console names the worker and what happened, the exit code is not 0, and no
process and no file is left in TMPDIR and in the folder of runs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from rpc_pipe.tracing import run_folders

_ROOT = Path(__file__).parents[1]
_STALL_S, _MOST_S, _START_S = 6, 10.0, 15.0
_SCRIPT = """
import os, resource, signal, sys, time
from collections import Counter
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline

what, rank, call = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def fault(x):
    if what.startswith("exception"): raise ArithmeticError("the user's own fault")
    if what == "recursion": return fault(x)
    if what == "no descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept = [open(os.devnull) for _ in range(99)]
    if what == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))
        open(sys.argv[0] + ".x", "wb").write(bytes(99999))
    if what == "out of memory": torch.empty(2**60)
    if what == "sys.exit": sys.exit(3)
    if what == "os._exit": os._exit(0)
    if what == "StopIteration": raise StopIteration
    if what == "KeyboardInterrupt": raise KeyboardInterrupt
    if what == "nan": return x * float("nan")
    if what == "hang": time.sleep(1000)
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "abort": os.abort()
    if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if what == "forked, killed":
        if os.fork() == 0: time.sleep(30); os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return x

where = what.removeprefix("exception in ") if what.startswith("exception in ") else "forward"
counted = Counter()

def at(place, x=None):
    counted[place] += 1
    due = place == where and counted[place] == call and os.environ["RANK"] == str(rank)
    return fault(x) if due else x

class Faulty(nn.Module):
    def forward(self, x):
        if x.requires_grad: x.register_hook(lambda grad: at("backward", grad))
        return at("forward", x)

class SGD(torch.optim.SGD):
    def step(self, *more):
        at("optimizer")
        return super().step(*more)

def loss_fn(output, target):
    return nn.functional.mse_loss(at("loss", output), target)

if what == "exception in start-up" and os.environ["RANK"] == str(rank): fault(0)
if what == "kill in start-up" and os.environ["RANK"] == str(rank): os.kill(os.getpid(), signal.SIGKILL)
if what == "exit in start-up" and os.environ["RANK"] == str(rank): sys.exit(0)
layers = [m for _ in range(3) for m in (partial(nn.Linear, 8, 8), Faulty)]
pipe = Pipeline(layers, loss_fn, num_microbatches=4, optimizer=partial(SGD, lr=0.1),
                stall_s=float(sys.argv[4]))
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
for step in range(100):
    at("script")
    pipe.step((x, x))
    if pipe.worker == 0:
        print("step", step, flush=True)
    time.sleep(0.02)
"""
#: by fault, what the block must say of it; @: the worker
_SAID = {
    "exception": r"worker @ failed \(running @F\d, step \d+\): ArithmeticError",
    "out of memory": r"worker @ failed \(running @F\d, step \d+\): RuntimeError.*(memory|size)",
    "sys.exit": r"worker @ failed \(running @F\d, step \d+\): SystemExit",
    "os._exit": r"worker @ ended with exit code 0 while running @F\d",
    "StopIteration": r"worker @ failed \(running @F\d, step \d+\): StopIteration",
    "KeyboardInterrupt": r"worker @ failed \(running @F\d, step \d+\): KeyboardInterrupt",
    "nan": r"the loss is nan",
    "hang": r"worker @ hangs: running @F\d",
    "segfault": r"worker @ was killed by signal 11 \(SIGSEGV\) while running @F\d",
    "abort": r"worker @ was killed by signal 6 \(SIGABRT\) while running @F\d",
    "kill": r"worker @ was killed by signal 9 \(SIGKILL\) while running @F\d",
    "stop": r"worker @ was stopped by a signal",
    "forked, killed": r"worker @ was killed by signal 9 \(SIGKILL\) while running @F\d",
    "exit in start-up": r"worker @ has ended without a Pipeline",
    "exception in start-up": r"worker @ failed.*ArithmeticError",
    "kill in start-up": r"worker @ was killed by signal 9 \(SIGKILL\) while starting up",
    "exception in backward": r"worker @ failed \(running @B\d, step \d+\): ArithmeticError",
    "exception in loss": r"worker @ failed \(running @F\d, step \d+\): ArithmeticError",
    "exception in optimizer": r"worker @ failed \(running @U0, step \d+\): ArithmeticError",
    "exception in script": r"worker @ failed.*at\(\"script\"\).*ArithmeticError",
    "recursion": r"worker @ failed \(running @F\d, step \d+\): RecursionError",
    "no descriptors": r"worker @ failed \(running @F\d, step \d+\): OSError.*Too many open files",
    "disk full": r"worker @ failed \(running @F\d, step \d+\): OSError.*File too large",
    "killed from outside": r"worker @ was killed by signal 9 \(SIGKILL\) while ",
    "terminated from outside": r"worker @ was killed by signal 15 \(SIGTERM\) while ",
    "launcher killed": "",
    "worker stopped, launcher killed": "",
    "launcher terminated": r"stopping after this step",
    "launcher hung up": r"stopping after this step",
}
_FROM_OUTSIDE = {"killed from outside": signal.SIGKILL, "terminated from outside": signal.SIGTERM}
_TO_LAUNCHER = {
    "launcher killed": signal.SIGKILL,
    "worker stopped, launcher killed": signal.SIGKILL,
    "launcher terminated": signal.SIGTERM,
    "launcher hung up": signal.SIGHUP,
}
#: what happens once a step, not once a microbatch
_RARE = ("exception in optimizer", "exception in script")


class Outcome(NamedTuple):
    """What became of a fault."""

    wrong: str
    seconds: float


def inflict(what: str, draw: random.Random, transport: str) -> Outcome:
    """Train, let a fault happen, and judge what is said and left."""
    rank, call = draw.randrange(3), draw.randrange(2, 9) if what in _RARE else draw.randrange(5, 40)
    if what == "exception in loss":
        rank = 2  # who has the last stage
    with tempfile.TemporaryDirectory() as folder:
        script, temporary = Path(folder, "train.py"), Path(folder, "tmp")
        script.write_text(_SCRIPT)
        temporary.mkdir()
        command = [sys.executable, "-m", "rpc_pipe", "run", str(script), "--workers", "3", "--transport", transport]
        command += ["--", what, str(rank), str(call), str(_STALL_S)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(temporary), "RPC_PIPE_LOGS": "off"}
        launcher = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=_ROOT
        )
        assert launcher.stdout is not None
        lines: list[str] = []
        workers: list[psutil.Process] = []
        last = time.monotonic()
        for line in launcher.stdout:
            lines.append(line)
            if re.search(r"\| step \d+$", line):
                last, workers = time.monotonic(), workers or psutil.Process(launcher.pid).children(recursive=True)
                if what in _FROM_OUTSIDE and "step 5" in line:
                    victim = next(w for w in workers if w.environ().get("RANK") == str(rank))
                    victim.send_signal(_FROM_OUTSIDE[what])
                if what in _TO_LAUNCHER and "step 5" in line:
                    if "stopped" in what:
                        workers[rank].send_signal(signal.SIGSTOP)
                    launcher.send_signal(_TO_LAUNCHER[what])
        code = launcher.wait()
        seconds = time.monotonic() - last
        wrong = _wrong(what, rank, code, "".join(lines))
        more = _STALL_S if what in ("hang", "stop") else _START_S if what.endswith("start-up") else 0
        if not wrong and seconds > _MOST_S + more:
            wrong = "it took too long"
        alive = [worker for worker in psutil.wait_procs(workers, timeout=2)[1] if not _is_zombie(worker)]
        if not wrong and alive:
            wrong = f"{len(alive)} processes are left"
        left = [*temporary.glob("rpc-pipe*"), *run_folders.root().glob(f"run-{launcher.pid}*")]
        if not wrong and left:
            wrong = f"files are left: {left}"
        if wrong:
            print("".join(lines[-12:]))
    return Outcome(wrong, seconds)


def _is_zombie(process: psutil.Process) -> bool:
    """Tell whether a process has ended, and only its new parent has not noticed yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _wrong(what: str, rank: int, code: int, said: str) -> str:
    if code == 0 or (what in _TO_LAUNCHER and code not in (-9, 128 + _TO_LAUNCHER[what])):
        return f"exit code {code}"
    if not re.search(_SAID[what].replace("@", str(rank)), said, re.DOTALL):
        return "the cause is not named"
    own = re.search(r'launching/(launcher|attempt)\.py", line \d+, in (run|watch|_)', said)  # not a worker's
    return "a traceback of the launcher" if own else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="random faults: are they named, and is anything left")
    parser.add_argument("--count", type=int, default=10, help="(10)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--only", metavar="KINDS", help=f"some of {'; '.join(_SAID)}")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="zmq")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kinds = options.only.split("; ") if options.only else list(_SAID)
    draw.shuffle(kinds)
    outcomes = []
    for number in range(options.count):
        what = kinds[number % len(kinds)]
        found = inflict(what, draw, options.transport)
        outcomes.append(found)
        print(f"{what:24} {found.seconds:6.1f} s  {found.wrong or 'right'}", flush=True)
    right = sum(not outcome.wrong for outcome in outcomes)
    times = sorted(outcome.seconds for outcome in outcomes)
    print(f"{right} of {len(outcomes)} right; from the last step to the end {statistics.median(times):.1f} s in the "
          f"middle, {times[-1]:.1f} at most (a hang is known after {_STALL_S} s)")  # fmt: skip
    sys.exit(right < len(outcomes))


if __name__ == "__main__":
    main()
