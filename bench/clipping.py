"""What clipping costs from step to step: in the simulator, and on emulated devices in processes of their own.

python bench/clipping.py simulated     every schedule, 8 workers, 16 microbatches, F = I = W = 10, B = 20, travel 0.4
python bench/clipping.py measured      some of them, 4 workers, 8 microbatches, devices of 10 ms for each of F, I and W

Three ways: without clipping; with updates that wait for the norm of all gradients; with updates that do not, and are
validated when it is known (`post_validation`), where no gradient had to be clipped, and where each third step's had to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

import torch
from torch import Tensor, nn

from bench import devices
from rpc_pipe.dependency import NO_REDUCTIONS, Action, Reductions
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES

_WAYS = {"none": NO_REDUCTIONS, "waits": Reductions(norms=True), "validated": Reductions(norms=True, validated=True)}
_TIMES = {"F": 10.0, "I": 10.0, "W": 10.0, "B": 20.0, "R": 10.0}
_SECONDS, _STEPS, _WARM_UP = 0.010, 24, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulated", "measured", "one"))
    parser.add_argument("--schedules", default="1f1b,zb-h1,zb-h2,zb-v")
    parser.add_argument("--workers", type=int, default=4)
    parsed = parser.parse_args()
    if parsed.what == "simulated":
        _simulated()
    elif parsed.what == "measured":
        _measured(parsed.schedules.split(","), parsed.workers)
    else:
        _one(parsed.workers)


def _simulated() -> None:
    def cost(action: Action) -> float:
        return _TIMES.get(action.kind.letter, 0.0)

    for name, cls in SCHEDULES.items():
        if not cls.synchronous:
            continue
        spec = make_spec(name, 8, 16)
        found = {
            way: simulate(Relation(spec, 6, asked), cost, comm=0.4, order="fixed").step_time
            for way, asked in _WAYS.items()
        }
        print(
            f"{name:<16}" + "".join(f"{way} {ms:8.1f} ({ms / found['none'] - 1:+.1%})  " for way, ms in found.items())
        )


def _measured(schedules: list[str], workers: int) -> None:
    for schedule in schedules:
        found: dict[str, float] = {}
        for way in ("none", "waits", "validated", "taken-back"):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "ms"
                command = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", str(workers)]
                command += ["--schedule", schedule, "--", "one", "--workers", str(workers)]
                env = {**os.environ, "CLIPPING_WAY": way, "CLIPPING_OUT": str(out)}
                subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
                found[way] = json.loads(out.read_text())
        figures = "".join(f"{way} {ms:7.1f} ms ({ms / found['none'] - 1:+.1%})  " for way, ms in found.items())
        print(f"{schedule:<8} P={workers} M={2 * workers}: {figures}", flush=True)


def _one(workers: int) -> None:
    """One worker's process: train on emulated devices; the first writes the time of a step."""
    devices.calibrate()
    torch.set_num_threads(1)
    way, num_microbatches = os.environ["CLIPPING_WAY"], 2 * workers
    stages = int(os.environ.get("RPC_PIPE_LAYERS", 2 * workers))
    times = devices.Times(_SECONDS * workers / stages, 1)
    pipe = Pipeline(
        [partial(devices.Device, times, times, times)] * stages,
        nn.functional.mse_loss,
        training=Training(
            partial(torch.optim.AdamW, lr=1e-6),
            max_grad_norm=None if way == "none" else 1e3,
            post_validation=None if way == "none" else way != "waits",
        ),
        num_microbatches=num_microbatches,
    )
    x = torch.randn(num_microbatches, devices.WIDTH, generator=torch.Generator().manual_seed(0))

    def batches() -> list[tuple[Tensor, Tensor]]:
        return [(x, x * 1e6 if way == "taken-back" and step % 3 == 0 else x) for step in range(_STEPS)]

    ends = []
    for _ in pipe.train(batches()):
        ends.append(time.perf_counter())
    if pipe.worker == 0:
        mean = 1e3 * (ends[-1] - ends[_WARM_UP]) / (len(ends) - 1 - _WARM_UP)
        Path(os.environ["CLIPPING_OUT"]).write_text(json.dumps(mean))


if __name__ == "__main__":
    main()
