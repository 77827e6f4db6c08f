"""Random faults of one member among others: whether its process and the cause are named, how soon, what is left.

    python tests/trials/members.py [--count 30] [--seed 0]

Two stages of two members each train by FSDP2, over RPC or ZeroMQ. At a random forward a random process is killed,
raises or hangs. It counts as right if the block on the console names that process and what happened, the exit code
is 1, no process is left, and a kill or an exception is named within 3 s.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_ROOT = Path(__file__).parents[2]
_STALL_S, _SOON_S, _PROCESSES = 6, 3.0, 4
_SCRIPT = f"""
import os, signal, sys, time
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline, Training

what, rank, call = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = []

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        calls.append(None)
        if os.environ["RANK"] == rank and len(calls) == call:
            print("at", time.time(), flush=True)
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "exception":
                raise ArithmeticError("on purpose")
            time.sleep(1000)
        return x + self.down(torch.tanh(self.up(x)))

torch.set_num_threads(1)
training = Training(partial(torch.optim.SGD, lr=1e-2))
pipe = Pipeline([Block] * 4, nn.functional.mse_loss, training=training, num_microbatches=8, members=2, shard="fsdp",
                stall_s={_STALL_S})
x = torch.randn(16, 16)
for _ in range(60):
    pipe.step((x, x))
"""
_SAID = {
    "kill": r"worker {0} was killed by signal 9 \(SIGKILL\) while running",
    "exception": r"── worker {0} failed ─(?s:.)*ArithmeticError: on purpose",
    "hang": r"worker {0} hangs: running \dF\d",
}


def trial(what: str, rank: int, call: int, transport: str) -> tuple[str, float]:
    """Let a fault happen; return what is wrong, and after how many seconds the launcher had ended."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(_SCRIPT)
        options = f"run {script} --workers {_PROCESSES} --members 2 --transport {transport} -- {what} {rank} {call}"
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        command = [sys.executable, "-m", "rpc_pipe", *options.split()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        end = time.time()
        said = done.stdout + done.stderr
        at = re.search(r"worker (\d) \| at ([\d.]+)", said)
        seconds = end - float(at[2]) if at else float("nan")
        wrong = [] if at and int(at[1]) == rank else ["no fault"]
        wrong += [] if done.returncode == 1 else [f"exit code {done.returncode}"]
        wrong += [] if re.search(_SAID[what].format(rank), said) else ["not named"]
        wrong += [] if what == "hang" or seconds < _SOON_S else ["late"]
        left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or ())]
        wrong += [f"left {left}"] if left else []
        if wrong:
            print(said)
        return ", ".join(wrong), seconds


def main() -> None:
    """Run the trials and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    typed = parser.parse_args()
    draw, right, took = random.Random(typed.seed), 0, {what: [] for what in _SAID}  # type: ignore[var-annotated]
    for number in range(typed.count):
        what, rank = list(_SAID)[number % len(_SAID)], draw.randrange(_PROCESSES)
        call, transport = draw.randrange(1, 300), draw.choice(["rpc", "zmq"])
        wrong, seconds = trial(what, rank, call, transport)
        took[what].append(seconds)
        right += not wrong
        print(f"{what} of {rank} at {call} by {transport}: {wrong or 'right'}, {seconds:.2f} s", flush=True)
    of = ", ".join(f"{what} {statistics.median(each):.2f} s" for what, each in took.items() if each)
    print(f"{right} of {typed.count} right; median until the launcher ended: {of}")


if __name__ == "__main__":
    main()
