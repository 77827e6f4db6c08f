"""What slices of sequences gain: time on emulated devices, memory of a real GPT. Each worker is a process of its own.

python bench/slices.py time      4 workers, 8 microbatches, devices of 40/80 ms (F/B), beside the simulator
python bench/slices.py memory    2 workers, a GPT on 4,096 tokens: by how much the peak grows over what the model takes
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

import torch
from torch import Tensor, nn

from bench import devices
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.specs import make_spec

_FORWARD_S, _BACKWARD_S, _TOKENS = 0.040, 0.080, 64
_STEPS, _WARM_UP = 8, 2
_OUT = "SLICES_OUT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "one-time", "one-memory"))
    parser.add_argument("--slices", default="1,2,4,8")
    parsed = parser.parse_args()
    if parsed.what == "one-time":
        _one_time()
    elif parsed.what == "one-memory":
        _one_memory()
    elif parsed.what == "time":
        _time(parsed.slices.split(","))
    else:
        _memory(parsed.slices.split(","))


def _run(what: str, workers: int, microbatches: int, slices: str) -> list[float]:
    """Run a worker in each of some processes; return what each has written."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", str(workers), "--transport", "zmq"]
        command += ["--microbatches", str(microbatches), "--slices", slices, "--", what]
        env = {**os.environ, _OUT: folder, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        return [json.loads((Path(folder) / str(worker)).read_text()) for worker in range(workers)]


def _tell(worker: int, value: Any) -> None:
    (Path(os.environ[_OUT]) / str(worker)).write_text(json.dumps(value))


def _time(slices: list[str]) -> None:
    plain = 0.0
    for said in slices:
        ms = _run("one-time", 4, 8, said)[0]
        plain = plain or ms
        spec = make_spec("1f1b", 4, 8, {"slices": said})
        costs = {"F": 1e3 * _FORWARD_S, "B": 1e3 * _BACKWARD_S}
        share = 1 / len(spec.parallelism.slices)
        simulated = simulate(spec, lambda action: costs.get(action.kind.letter, 0.0) * share).makespan  # noqa: B023
        print(
            f"slices {said}: {ms:.0f} ms a step, {plain / ms:.2f} x plain 1f1b; simulated {simulated:.0f} ms",
            flush=True,
        )


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.share = x.shape[1] / _TOKENS
        devices.work(_FORWARD_S * ctx.share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        devices.work(_BACKWARD_S * ctx.share)
        return grad.clone()


class _Device(nn.Module):
    """A stage that is busy for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Busy.apply(x * self.weight)  # type: ignore[no-untyped-call]
        return found


def _one_time() -> None:
    devices.calibrate()
    torch.set_num_threads(1)
    training = Training(partial(torch.optim.SGD, lr=1e-6))
    pipe = Pipeline([_Device] * 4, nn.functional.mse_loss, training=training, num_microbatches=8)
    x = torch.randn(8, _TOKENS, 8, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        pipe.step((x, x))
        times.append(time.perf_counter() - begin)
    _tell(pipe.worker, 1e3 * sorted(times[_WARM_UP:])[(_STEPS - _WARM_UP) // 2])


def _memory(slices: list[str]) -> None:
    plain = 0.0
    for said in slices:
        grown = _run("one-memory", 2, 4, said)
        plain = plain or max(grown)
        each = ", ".join(f"{mib:.0f}" for mib in grown)
        print(
            f"slices {said}: {each} MiB on workers 0, 1; the most is {max(grown) / plain:.2f} of plain 1f1b", flush=True
        )


def _one_memory() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape: Any = {"vocab_size": 256, "n_embd": 256, "n_layer": 8, "n_head": 4, "n_positions": 4096}
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0))
    ids = torch.randint(256, (4, 4096), generator=torch.Generator().manual_seed(0))
    short = {"input_ids": ids[:, :64], "labels": ids[:, :64]}
    training = Training(partial(torch.optim.SGD, lr=1e-3))
    pipe = Pipeline(model, training=training, num_microbatches=4)
    pipe.step(short)  # which leaves all that does not depend on the length
    before = _resident("VmRSS")
    pipe.step({"input_ids": ids, "labels": ids})  # looks at the model, as no later one does
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    pipe.step({"input_ids": ids, "labels": ids})
    _tell(pipe.worker, _resident("VmHWM") - before)


def _resident(what: str) -> float:
    """Return MiB of memory that the process has (VmRSS), or has had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


if __name__ == "__main__":
    main()
