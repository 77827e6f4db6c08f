"""Train for long and see what grows: memory, descriptors and threads of all processes; faults happen meanwhile.

    python tests/trials/soak.py [--seconds 60] [--fault-every 20] [--transport zmq]

Every so often a worker gets a signal that ends it, and the launcher starts the job again from its last checkpoint.
A worker's figures are the slopes of lines fitted to its life (least squares), per 1,000 steps, behind those in which
it is still starting and ahead of its end; the launcher's, which sees all attempts, its second half against its first.
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
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

_ROOT = Path(__file__).parents[2]
_LOOK_EVERY_S, _BEFORE_THE_END_S = 0.5, 5.0
#: of a life, in which allocators and caches fill and the first checkpoints are written
_FIRST_STEPS = 600
#: steps and samples that a line needs, and samples ahead of a death, which has figures of its own
_LEAST_STEPS, _LEAST_SAMPLES, _LAST_SAMPLES = 200, 10, 4
_FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGBUS)
_SCRIPT = """
import os, sys, time
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

layers = [partial(nn.Linear, 64, 64), nn.Tanh, partial(nn.Linear, 64, 64), nn.Tanh, partial(nn.Linear, 64, 64)]
pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=8, training=Training(partial(torch.optim.SGD, lr=0.1)))
draw, step = torch.Generator().manual_seed(0), 0
while not pipe.stopped:
    rows = 32 + step % 7  # shapes change
    pipe.step((torch.randn(rows, 64, generator=draw), torch.randn(rows, 64, generator=draw)))
    step += 1
    if step % 20 == 0:
        print("process", os.getpid(), "step", step, flush=True)
"""


class Sample(NamedTuple):
    """A worker at one moment."""

    rss_mb: float
    descriptors: float
    threads: float
    #: that its worker has trained
    step: int = 0


class Watch(threading.Thread):
    """Looks at the workers, and kills one now and then."""

    def __init__(self, launcher: int, fault_every_s: float, seconds: float) -> None:
        super().__init__(daemon=True)
        #: a worker that is killed when the others stop may have ended its script
        self._no_faults_after = time.monotonic() + seconds - _BEFORE_THE_END_S
        self._launcher, self._every_s = psutil.Process(launcher), fault_every_s
        self.samples: dict[int, list[Sample]] = {}
        self._of_launcher: list[Sample] = []
        #: by process: the step before its first own one, and its last one
        self._begins: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._until = time.monotonic() + seconds
        self.faults = 0

    def run(self) -> None:
        draw, next_fault = random.Random(0), time.monotonic() + self._every_s
        while self._launcher.is_running() and self._launcher.status() != psutil.STATUS_ZOMBIE:
            try:
                self._of_launcher.append(_sampled(self._launcher))
                workers = self._launcher.children()
                for worker in workers:
                    step = self._steps.get(worker.pid, 0)
                    if step > self._begins.get(worker.pid, step) + _FIRST_STEPS and time.monotonic() < self._until:
                        self.samples.setdefault(worker.pid, []).append(_sampled(worker)._replace(step=step))
                if self._every_s and workers and next_fault < time.monotonic() < self._no_faults_after:
                    next_fault = time.monotonic() + self._every_s
                    self.faults += 1
                    draw.choice(workers).send_signal(draw.choice(_FAULTS))
            except psutil.Error:
                pass
            time.sleep(_LOOK_EVERY_S)

    def told(self, process: int, step: int) -> None:
        """Note that a worker has made so many steps, of which those that an earlier one had made may not be trained."""
        self._begins.setdefault(process, max(self._steps.values(), default=0))
        self._steps[process] = step

    def growth(self) -> list[Sample]:
        """Return by how much each life that was long enough has grown, per 1,000 steps."""
        lives = [life[:-_LAST_SAMPLES] for life in self.samples.values() if len(life) >= _LEAST_SAMPLES + _LAST_SAMPLES]
        return [_slopes(life) for life in lives if life[-1].step - life[0].step >= _LEAST_STEPS]

    def growth_of_launcher(self) -> Sample:
        """Return by how much the second half of the launcher's life was above the first, in the median."""
        return _grown(self._of_launcher)


def _sampled(process: psutil.Process) -> Sample:
    with process.oneshot():
        return Sample(process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())


def _slopes(life: list[Sample]) -> Sample:
    steps = [sample.step / 1000 for sample in life]
    mb, descriptors, threads = (
        statistics.linear_regression(steps, [sample[field] for sample in life]).slope for field in range(3)
    )
    return Sample(mb, descriptors, threads)


def _grown(life: list[Sample]) -> Sample:
    late = life[len(life) // 4 :]  # it is still starting before
    first, second = late[: len(late) // 2], late[len(late) // 2 :]
    mb, descriptors, threads = (_median(second, field) - _median(first, field) for field in range(3))
    return Sample(mb, descriptors, threads)


def _median(life: list[Sample], field: int) -> float:
    return statistics.median(sample[field] for sample in life)


def main() -> None:
    parser = argparse.ArgumentParser(description="train for long, with faults, and see what grows")
    parser.add_argument("--seconds", type=float, default=60, help="(60)")
    parser.add_argument("--fault-every", type=float, default=20, help="seconds; 0: none (20)")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="zmq")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(_SCRIPT)
        command = [sys.executable, "-m", "rpc_pipe", "run", str(script), "--workers", "2"]
        command += ["--transport", options.transport, "--max-restarts", "100000", "--checkpoint-every", "50"]
        command += ["--checkpoint-folder", f"{folder}/checkpoints", "--checkpoint-keep", "2"]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "RPC_PIPE_LOGS": "off"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as launcher:
            watch = Watch(launcher.pid, options.fault_every, options.seconds)
            watch.start()
            threading.Timer(options.seconds, launcher.send_signal, (signal.SIGTERM,)).start()
            assert launcher.stdout is not None
            lines = []
            for line in launcher.stdout:
                lines.append(line)
                if match := re.search(r"process (\d+) step (\d+)$", line):
                    watch.told(int(match[1]), int(match[2]))
            code = launcher.wait()
    said = "".join(lines)
    steps = [int(step) for step in re.findall(r"step (\d+)$", said, re.MULTILINE)]
    restarts, grown = said.count("starting again"), watch.growth()
    print(f"{options.seconds:g} s, {max(steps, default=0)} steps, {watch.faults} kills, {restarts} restarts, "
          f"exit code {code}")  # fmt: skip
    if grown:
        for whose, of in (("the median", statistics.median), ("the largest", max)):
            mb, descriptors, threads = (of(life[field] for life in grown) for field in range(3))
            print(f"growth of a worker per 1,000 steps, {whose} of {len(grown)} lives: {mb:+.2f} MB, "
                  f"{descriptors:+.2f} descriptors, {threads:+.2f} threads")  # fmt: skip
    found = watch.growth_of_launcher()
    print(f"growth of the launcher, second half against first: {found.rss_mb:+.1f} MB, "
          f"{found.descriptors:+g} descriptors, {found.threads:+g} threads")  # fmt: skip
    failed = code != 128 + signal.SIGTERM or restarts < watch.faults
    if failed:
        print(said[-3000:])
    sys.exit(failed)


if __name__ == "__main__":
    main()
