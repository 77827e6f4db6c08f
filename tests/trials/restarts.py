"""Kills and automatic restarts: whether the final weights are those of a run that nothing disturbed, bit for bit.

    python tests/trials/restarts.py [--count 10] [--seed 0] [--transport zmq]

Each run trains with dropout, momentum and data that are drawn anew in every step. A worker is killed (SIGKILL): of
three runs in one while workers start and meet, in one around a checkpoint, in one at a random step; in some a worker of
the second attempt is killed too. The launcher starts the job again. All are forks of a process that has imported torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

if __package__ is None or __package__ == "":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])

import psutil

from trials.forked import Forked, prepare

_ROOT = Path(__file__).parents[2]
_STEPS = 24
#: a checkpoint follows so many steps
_EVERY = 3
#: by then workers that are forks have met, s
_MEETING_S = 1.0
_SCRIPT = f"""
import time
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

layers = [partial(nn.Linear, 32, 32), partial(nn.Dropout, 0.2), nn.Tanh, partial(nn.Linear, 32, 32), nn.Tanh]
pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4,
                training=Training(partial(torch.optim.SGD, lr=0.1, momentum=0.9)))
draw = torch.Generator().manual_seed(0)
for step in range({_STEPS}):
    pipe.step((torch.randn(8, 32, generator=draw), torch.randn(8, 32, generator=draw)))
    if pipe.worker == 0:
        print("step", step, flush=True)
    time.sleep(0.01)
"""


def train(kills: list[tuple[int, int, float]], transport: str, workers: int) -> tuple[str, int, str]:
    """Train and kill; return the digest of the weights, how often the job was started again, and what was said.

    Args:
        kills: step (-1: the start), worker, seconds after it; the second one is for workers of the second attempt.
    """
    folder = Path(tempfile.mkdtemp())  # no TemporaryDirectory: what a fork inherits would remove it at its end
    try:
        (folder / "train.py").write_text(_SCRIPT)
        weights = folder / "weights.safetensors"
        command = [sys.executable, "-m", "rpc_pipe", "run", str(folder / "train.py"), "--workers", str(workers)]
        command += [
            "--transport",
            transport,
            "--max-restarts",
            "4",
            "--checkpoint-every",
            str(_EVERY),
            "--save",
            str(weights),
        ]
        command += ["--checkpoint-folder", str(folder / "checkpoints"), "--checkpoint-keep", "2"]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "RPC_PIPE_LOGS": "off"}
        launcher = Forked(command, text=True, env=environment, cwd=_ROOT)
        lines, left = [], list(kills)
        if left and left[0][0] < 0:
            _, rank, after = left.pop(0)
            threading.Timer(after, _kill, (launcher.pid, rank)).start()
        for line in launcher.stdout:
            lines.append(line)
            found = re.search(r"step (\d+)$", line)
            if found and left and int(found[1]) >= left[0][0]:
                _, rank, after = left.pop(0)
                time.sleep(after)
                _kill(launcher.pid, rank)
        code = launcher.wait()
        said = "".join(lines)
        if code or not weights.exists():
            return f"exit code {code}", said.count("starting again"), said
        return hashlib.sha256(weights.read_bytes()).hexdigest(), said.count("starting again"), said
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kill(launcher: int, rank: int) -> None:
    with suppress(psutil.Error, IndexError):  # it has ended by itself
        workers = psutil.Process(launcher).children()
        sorted(workers, key=lambda worker: (worker.create_time(), worker.pid))[rank].send_signal(signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="kills, restarts, and the same weights in the end")
    parser.add_argument("--count", type=int, default=10, help="runs with a kill (10)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="zmq")
    options = parser.parse_args()
    prepare()
    draw = random.Random(options.seed)
    wanted, _, said = train([], options.transport, options.workers)
    if len(wanted) != 64:
        sys.exit(f"the undisturbed run failed:\n{said}")
    same = kills = 0
    for number in range(options.count):
        count = 1 + (number % 5 == 0)  # in some runs a worker of the second attempt is killed too
        steps = sorted(draw.randrange(_STEPS - 1) for _ in range(count))
        if number % 3 == 1:
            steps = [step - step % _EVERY + _EVERY - 1 for step in steps]
        plan = [(step, draw.randrange(options.workers), draw.random() / 50) for step in steps]
        if number % 3 == 2:
            plan[0] = (-1, plan[0][1], draw.random() * _MEETING_S)
        found, restarts, said = train(plan, options.transport, options.workers)
        kills += restarts
        same += found == wanted
        right = found == wanted and (restarts == count or plan[0][0] < 0)  # it may not have been there yet
        print(f"killed after {', '.join(f'step {step} worker {rank}' for step, rank, _ in plan)}: {restarts} restarts, "
              f"{'the same weights' if found == wanted else 'DIFFERENT: ' + found}", flush=True)  # fmt: skip
        if not right:
            print(said[-3000:])
    print(f"{same} of {options.count} runs ended with the weights of the undisturbed one; {kills} kills and restarts")
    sys.exit(same < options.count)


if __name__ == "__main__":
    main()
