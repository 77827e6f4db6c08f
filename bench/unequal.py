"""Unequal microbatches as they come and balanced, on emulated devices whose time follows length; 4 processes.

python bench/unequal.py                        1f1b and zb-v, lognormal lengths, beside the simulator
python bench/unequal.py --schedules 1f1b,zb-h1 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

import torch
from torch import Tensor, nn

from bench import devices
from rpc_pipe.dependency import Action
from rpc_pipe.dependency.pipeline_options import MICROBATCH_ORDERS
from rpc_pipe.pipeline import Pipeline, SplitBatch, Training
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.planning.unequal import by_microbatch

_WORKERS, _MICROBATCHES, _LAYERS, _TOKENS, _WIDTH = 4, 16, 8, 64, 8
#: seconds of a worker's share for a microbatch of `_TOKENS` tokens, by kind
_SECONDS = {"F": 0.010, "I": 0.010, "W": 0.010, "B": 0.020}
_STEPS, _WARM_UP = 6, 1
_OUT, _EMPTY = "UNEQUAL_OUT", "UNEQUAL_EMPTY"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "one"), default="all")
    parser.add_argument("--schedules", default="1f1b,zb-v")
    parser.add_argument("--rounds", type=int, default=2)
    parsed = parser.parse_args()
    if parsed.what == "one":
        _one()
        return
    for schedule in parsed.schedules.split(","):
        fixed = _fixed_ms(schedule, parsed.rounds)
        print(f"{schedule}: {fixed:.2f} ms of an action are no device's, measured on devices that take no time")
        times: list[list[float]] = [[] for _ in MICROBATCH_ORDERS]
        for _ in range(parsed.rounds):
            for order, found in zip(MICROBATCH_ORDERS, times, strict=True):
                found.append(_run(schedule, order))
        first, expected = 0.0, 0.0
        for order, found in zip(MICROBATCH_ORDERS, times, strict=True):
            ms, simulated = statistics.median(found), _simulated(schedule, order, fixed)
            first, expected = first or ms, expected or simulated
            print(
                f"{schedule} {order}: {ms:.0f} ms (simulated {simulated:.0f}), "
                f"{first / ms:.2f} x ({expected / simulated:.2f} x)",
                flush=True,
            )


def _tokens() -> list[int]:
    numbers = random.Random(0)
    return [max(1, round(_TOKENS * numbers.lognormvariate(0, 0.7))) for _ in range(_MICROBATCHES)]


def _fixed_ms(schedule: str, rounds: int) -> float:
    """Return the milliseconds by which an action is longer than its device is busy, its payload's way included."""
    spec = make_spec(schedule, _WORKERS, _MICROBATCHES, {})
    actions = simulate(spec, lambda action: 1.0 if action.kind.letter in _SECONDS else 0.0).makespan
    return statistics.median(_run(schedule, "given", empty=True) for _ in range(rounds)) / actions


def _run(schedule: str, order: str, *, empty: bool = False) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ms"
        command = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", str(_WORKERS), "--transport", "zmq"]
        command += ["--schedule", schedule, "--microbatch-order", order, "--", "one"]
        env = {**os.environ, _OUT: str(out), "OMP_NUM_THREADS": "1", _EMPTY: "1" * empty}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        return float(json.loads(out.read_text()))


def _simulated(schedule: str, order: str, fixed: float) -> float:
    tokens = _tokens()
    spec = make_spec(schedule, _WORKERS, _MICROBATCHES, {})
    elements, times = [_WIDTH * each for each in tokens], [each / _TOKENS for each in tokens]
    _, factor = by_microbatch(spec, lengths=elements, order=order, relative=lambda action, number: times[number])
    share = _WORKERS / spec.num_stages

    def cost(action: Action) -> float:
        seconds = _SECONDS.get(action.kind.letter, 0.0)
        return 1e3 * share * seconds * factor(action) + (fixed if seconds else 0.0)

    return simulate(spec, cost).makespan


class _Path(torch.autograd.Function):
    """A path of a backward: towards inputs, or towards weights."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s  # type: ignore[attr-defined]
        devices.work(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        devices.work(ctx.backward_s)  # type: ignore[attr-defined]
        return grad.clone(), None, None


class _Layer(nn.Module):
    """A layer that is busy for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        share = x.shape[1] / _TOKENS * _WORKERS / _LAYERS
        inputs: Tensor = _Path.apply(x, share * _SECONDS["F"], share * _SECONDS["I"])  # type: ignore[no-untyped-call]
        weight: Tensor = _Path.apply(self.weight, 0.0, share * _SECONDS["W"])  # type: ignore[no-untyped-call]
        return inputs * weight


def _one() -> None:
    with devices.instantly() if os.environ[_EMPTY] else nullcontext():
        _train()


def _train() -> None:
    devices.calibrate()
    torch.set_num_threads(1)
    training = Training(partial(torch.optim.SGD, lr=1e-6))
    pipe = Pipeline([_Layer] * _LAYERS, nn.functional.mse_loss, training=training, num_microbatches=_MICROBATCHES)
    # Inputs owe a gradient, so that all stages work alike.
    batch = SplitBatch(
        (torch.ones(1, tokens, _WIDTH).requires_grad_(), torch.ones(1, tokens, _WIDTH)) for tokens in _tokens()
    )
    times = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        pipe.step(batch)
        times.append(time.perf_counter() - begin)
    if pipe.worker == 0:
        Path(os.environ[_OUT]).write_text(json.dumps(1e3 * statistics.median(times[_WARM_UP:])))


if __name__ == "__main__":
    main()
