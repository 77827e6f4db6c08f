"""Emulated devices, whose compute sleeps: what the runtime adds to what the simulator plans.

    python bench/emulated.py [--workers 4] [--microbatches 8] [--ms 10] [--schedules zb-h2,zb-v] [--json FILE]

Every worker is a process over RPC. Steps follow each other without a barrier. t_F = t_I = t_W = --ms for a worker's
share of the model, t_B twice that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpc_pipe.dependency import B, F, I, R, W
from rpc_pipe.options import make_spec
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.simulator import simulate, uniform

_SCHEDULES = "gpipe,1f1b,eager-1f1b,interleaved,hanayo,chimera,zb-h1,zb-h2,zb-v,v-half,v-min,dualpipe,dualpipev"
_WARM_UP, _STEPS = 2, 8


class _Inputs(torch.autograd.Function):
    """Forward, and the backward for the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class _Weights(torch.autograd.Function):
    """The backward for the weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Device(nn.Module):
    """A stage that takes time and computes nearly nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = _Inputs.apply(x, self.seconds) * _Weights.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return scaled


def work(schedule: str, microbatches: int, ms: float, out: str) -> None:
    """Run in every worker."""
    workers = int(os.environ["WORLD_SIZE"])
    spec = make_spec(schedule, workers, microbatches)
    seconds = ms / 1e3 * workers / spec.num_stages
    pipe = Pipeline(
        [partial(Device, seconds)] * spec.num_stages,
        nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        num_microbatches=microbatches,
        schedule=schedule,
    )
    # The inputs owe a gradient too, so that the first stage's I takes time like any other.
    batch = torch.randn(microbatches, 64, requires_grad=True), torch.randn(microbatches, 64)
    ends = []
    for _ in range(_WARM_UP + _STEPS):
        pipe.step(batch)
        ends.append(time.perf_counter())
    steps = [1e3 * (b - a) for a, b in zip(ends[_WARM_UP - 1 :], ends[_WARM_UP:], strict=False)]
    if pipe.worker == 0:
        t = 1e3 * seconds
        cost = uniform({F: t, I: t, W: t, R: t, B: 2 * t})
        row = {
            "scenario": "emulated",
            "system": "rpc-pipe",
            "schedule": schedule,
            "workers": workers,
            "microbatches": microbatches,
            "median_ms": statistics.median(steps),
            "limit_ms": simulate(spec, cost, steps=4).step_time,
            "one_step_ms": simulate(spec, cost).makespan,
            "peak_activations": max(simulate(spec, cost).peak_activations),
        }
        Path(out).write_text(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=4, help="(4)")
    parser.add_argument("--microbatches", type=int, default=8, help="(8)")
    parser.add_argument("--ms", type=float, default=10, help="t_F of a worker's share (10)")
    parser.add_argument("--schedules", default=_SCHEDULES, help="names with commas (all synchronous ones)")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    rows = []
    print(f"{options.workers} workers, {options.microbatches} microbatches, t_F = t_I = t_W = {options.ms:g} ms")
    print("schedule          step ms  planned  one step alone  planned/step")
    for schedule in options.schedules.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row.json"
            arguments = [schedule, str(options.microbatches), str(options.ms), str(out)]
            launch = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", str(options.workers)]
            subprocess.run([*launch, "--", *arguments], check=True, timeout=300)
            row = json.loads(out.read_text())
        rows.append(row)
        print(
            f"{schedule:16} {row['median_ms']:8.1f} {row['limit_ms']:8.1f} {row['one_step_ms']:15.1f}"
            f" {row['limit_ms'] / row['median_ms']:13.3f}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        work(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
    else:
        main()
