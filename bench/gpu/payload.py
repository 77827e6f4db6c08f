"""A pipeline without compute: ms of a crossing from worker to worker.  payload.py MIB,MIB.. MICROBATCHES STEPS"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from functools import partial

import torch
from torch import nn

from bench.gpu.models import PLANTED
from rpc_pipe import Pipeline, Training

logging.basicConfig(level=logging.INFO)


def refuse_handles() -> None:
    """Let no worker share memory of its device, as a driver or a container may."""
    from rpc_pipe.workers.compute.devices.accelerator import Cuda

    def share(self: Cuda, memory: torch.Tensor) -> None:
        raise RuntimeError("refused, as a driver may")

    Cuda.share = share  # type: ignore[method-assign]


class Scale(nn.Module):
    """Costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def main(sizes: str, microbatches: str, steps: str) -> None:
    """Measure: a step has a crossing forwards and one backwards for each microbatch."""
    if os.environ.get("GPU_REFUSED"):
        refuse_handles()
    device, count = os.environ.get("GPU_DEVICE", "cpu"), int(microbatches)
    training = Training(optimizer=partial(torch.optim.SGD, lr=0.0))
    pipe = Pipeline([Scale, Scale], lambda y, t: y.mean() + t.mean(), training=training, num_microbatches=count)
    found = {}
    for mib in map(int, sizes.split(",")):
        x, t = torch.randn(count, mib * 2**18, device=device), torch.randn(count, 1, device=device)
        expected = float(sum((x[i].mean() + t[i].mean()) / count for i in range(count)))
        times = []
        for _ in range(3 + int(steps)):
            begin = time.perf_counter()
            loss = pipe.step((x, t))
            times.append(1e3 * (time.perf_counter() - begin))
        if PLANTED == "wrong":
            loss = loss + 1
        if abs(float(loss) - expected) > 1e-5:
            raise SystemExit(f"{mib} MiB: the loss is {float(loss)}, not {expected}")
        found[f"{mib} MiB"] = round(statistics.median(times[3:]) / (2 * count), 3)
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
