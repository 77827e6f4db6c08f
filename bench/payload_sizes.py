"""What payloads cost by their size: two layers that only multiply, one worker's time over that of two processes.

    python -m bench.payload_sizes [--mib 4,16,64] [--transport rpc] [--turns 2]

Nothing is computed that takes longer than reading the payload, so what is below 1 is what a cut costs at most. Each
turn starts one worker and then two, 8 microbatches, 1F1B; the ratio is that of the medians of all turns' steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training

_ROOT = Path(__file__).parents[1]
_SCRIPT = """
import sys, time
from bench.payload_sizes import multiplying

pipe, batch = multiplying(int(sys.argv[1]), 8)
for step in range(int(sys.argv[2])):
    begin = time.perf_counter()
    pipe.step(batch)
    if pipe.worker == 0 and step > 2:
        print("ms", (time.perf_counter() - begin) * 1e3, flush=True)
"""


class _Multiply(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def multiplying(mib: int, num_microbatches: int) -> tuple[Pipeline, tuple[Tensor, Tensor]]:
    """Return a pipeline of two layers that multiply by one weight, and a batch whose microbatches have so many MiB."""
    training = Training(optimizer=partial(torch.optim.SGD, lr=1e-3))
    layers = [_Multiply(), _Multiply()]
    pipe = Pipeline(layers, lambda y, t: (y * y).mean(), num_microbatches=num_microbatches, training=training)
    return pipe, (torch.randn(num_microbatches, mib << 18), torch.zeros(num_microbatches, 1))


def steps_ms(script: Path, workers: int, mib: int, transport: str) -> list[float]:
    """Return the times of the steps of a job, without the first three."""
    command = [sys.executable, "-m", "rpc_pipe", "run", str(script), "--workers", str(workers)]
    command += ["--transport", transport, "--", str(mib), str(max(16, 160 // mib))]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=script.parent)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if "ms " in line and line.split()[-2] == "ms"]


def main() -> None:
    """Measure, and print a row a size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", default="4,16,64", help="sizes of a payload (4,16,64)")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="rpc")
    parser.add_argument("--turns", type=int, default=2, help="(2)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(_SCRIPT)
        for mib in map(int, options.mib.split(",")):
            times: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(options.turns):
                for workers, found in times.items():
                    found += steps_ms(script, workers, mib, options.transport)
            one, two = (statistics.median(found) for found in times.values())
            print(f"{mib:3} MiB: one worker {one:7.1f} ms, two {two:7.1f} ms, ratio {one / two:.2f}", flush=True)


if __name__ == "__main__":
    main()
