"""Schedules whose forwards overtake updates: their rate on emulated devices, their memory, their bits under delays.

python bench/asynchronous.py rate      8 processes whose stages sleep 10 and 20 ms: samples a second, and of 1F1B;
                                       --forward-ms 50 --backward-ms 100, --set window=10 as for `rpc-pipe run`;
                                       first of as many processes that run the same operators without a pipeline
python bench/asynchronous.py memory    5000 steps of a stream: resident memory, and what is kept for others
python bench/asynchronous.py delays    1000 runs with random delays, in both orders: how many differ from a replay
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

import torch
from torch import Tensor, nn

from bench import devices
from bench.replaying import replay_of
from rpc_pipe.dependency import B, F
from rpc_pipe.dependency.earlier_steps import most_open
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.modules.randomness import Randomness
from rpc_pipe.workers.hooks import Listener

_ASYNCHRONOUS = [name for name, cls in SCHEDULES.items() if not cls.synchronous]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rate", "memory", "delays", "one-rate"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first run, so that several commands share them"
    )
    parser.add_argument("--schedules", default="")
    parser.add_argument("--forward-ms", type=float, default=10)
    parser.add_argument("--backward-ms", type=float, default=20)
    parser.add_argument("--set", default="", help="options of the schedules, but of 1f1b")
    parsed = parser.parse_args()
    {"rate": _rates, "memory": _memory, "delays": _delays, "one-rate": _rate}[parsed.what](parsed)


def _rates(parsed: argparse.Namespace) -> None:
    both_ms = parsed.forward_ms + parsed.backward_ms
    ideal = 1e3 / both_ms
    found: dict[str, float] = {}
    alone = _alone(parsed)
    print(f"no pipeline: {alone:.2f} microbatches/s, {alone / ideal:.3f} of one per {both_ms:g} ms", flush=True)
    for schedule in (parsed.schedules or "1f1b,pipedream,pipedream-2bw,avgpipe").split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rate"
            command = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", str(parsed.workers)]
            options = [] if schedule == "1f1b" or not parsed.set else ["--set", parsed.set]
            command += ["--schedule", schedule, *options, "--", "one-rate", "--microbatches", str(parsed.microbatches)]
            command += ["--steps", str(parsed.steps or 24)]
            command += ["--forward-ms", str(parsed.forward_ms), "--backward-ms", str(parsed.backward_ms)]
            subprocess.run(command, check=True, env={**os.environ, "RATE_OUT": str(out)}, stdout=subprocess.DEVNULL)
            found[schedule] = json.loads(out.read_text())
        given = dict(option.split("=") for option in options[1:])
        spec = make_spec(schedule, parsed.workers, parsed.microbatches, given)
        steps = simulate(spec, uniform({F: parsed.forward_ms, B: parsed.backward_ms}), steps=12)
        limit = parsed.microbatches * 1e3 / steps.step_time
        relative = found[schedule] / found["1f1b"] if "1f1b" in found else float("nan")
        print(
            f"{schedule:<14} P={parsed.workers} M={parsed.microbatches}: {found[schedule]:.2f} microbatches/s, "
            f"{found[schedule] / ideal:.3f} of one per {both_ms:g} ms, {found[schedule] / limit:.3f} of its own limit, "
            f"{found[schedule] / alone:.3f} of no pipeline, "
            f"{relative:.2f} x 1f1b with a flush",
            flush=True,
        )


def _alone(parsed: argparse.Namespace) -> float:
    """Return how many microbatches a second each of as many processes computes that have nothing to do with others."""
    context = multiprocessing.get_context("spawn")
    together, times = context.Barrier(parsed.workers), context.SimpleQueue()
    processes = [context.Process(target=_compute, args=(parsed, together, times)) for _ in range(parsed.workers)]
    for process in processes:
        process.start()
    slowest: float = max(times.get() for _ in processes)
    for process in processes:
        process.join()
    return int(parsed.steps or 24) * int(parsed.microbatches) / slowest


def _compute(parsed: argparse.Namespace, together: Barrier, times: SimpleQueue[float]) -> None:
    """A process of `_alone`; puts the seconds that it has taken."""
    devices.calibrate()
    torch.set_num_threads(1)
    device = _layer(parsed)()
    optimizer = torch.optim.SGD(device.parameters(), lr=1e-3)
    x = torch.randn(1, devices.WIDTH, requires_grad=True)
    together.wait()
    begin = time.perf_counter()
    for _ in range(parsed.steps or 24):
        for _ in range(parsed.microbatches):
            device(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    times.put(time.perf_counter() - begin)


def _layer(parsed: argparse.Namespace) -> Callable[[], nn.Module]:
    return partial(devices.Device, *(devices.Times(ms / 1e3, 1) for ms in (parsed.forward_ms, parsed.backward_ms)))


def _rate(parsed: argparse.Namespace) -> None:
    """One worker's process: train on emulated devices; the first writes how many microbatches a second."""
    devices.calibrate()
    torch.set_num_threads(1)
    M = parsed.microbatches
    pipe = Pipeline(
        [_layer(parsed)] * int(os.environ.get("RPC_PIPE_LAYERS", parsed.workers)),
        nn.functional.mse_loss,
        training=Training(partial(torch.optim.SGD, lr=1e-3)),
        num_microbatches=M,
    )
    x = torch.randn(M, devices.WIDTH, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in pipe.train((x, x) for _ in range(parsed.steps)):
        times.append(time.perf_counter())
    if pipe.worker == 0:
        first, last = 4, len(times) - 1 - (0 if pipe.spec.synchronous else most_open(pipe.spec))
        Path(os.environ["RATE_OUT"]).write_text(json.dumps(M * (last - first) / (times[last] - times[first])))


def _mlp(width: int = 16, dropout: float = 0.1) -> list[partial[nn.Module]]:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))

    return [partial(layer)] * 4


def _adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)


def _memory(parsed: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    steps = parsed.steps or 5000
    x = torch.randn(4, 16)
    for schedule in (parsed.schedules or ",".join(_ASYNCHRONOUS)).split(","):
        pipe = Pipeline(
            _mlp(),
            nn.functional.mse_loss,
            training=Training(_adamw),
            schedule=schedule,
            num_workers=2,
            num_microbatches=2,
        )
        print(schedule, end="", flush=True)
        for step, _ in enumerate(pipe.train((x, x) for _ in range(steps)), 1):
            if step in (steps // 10, steps // 2, steps):
                kept = sum(len(actor.carrier.outbox) for actor in pipe.actors)
                print(f"  step {step}: {_resident_mb():.1f} MB, {kept} payloads kept", end="", flush=True)
        print(f"; most ever {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.1f} MB", flush=True)
        pipe.close()


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class _Late(Listener):
    def __init__(self, seed: str) -> None:
        self._draw = random.Random(seed)

    def action_started(self, step: int, action: object) -> None:
        if self._draw.random() < 0.5:
            time.sleep(0.002 * self._draw.random())


def _delays(parsed: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    x = torch.randn(5, 9, 16, generator=torch.Generator().manual_seed(0))
    batches = [(each, each) for each in x]
    differ, expected = 0, {}
    begin = time.perf_counter()
    for run in range(parsed.first, parsed.first + parsed.runs):
        draw = random.Random(run)
        schedule, P, M = draw.choice(_ASYNCHRONOUS), draw.choice([2, 3, 4]), draw.choice([1, 2, 3, 4])
        pipe = Pipeline(
            _mlp(),
            nn.functional.mse_loss,
            training=Training(_adamw, max_grad_norm=draw.choice([None, 0.1])),
            schedule=schedule,
            num_workers=P,
            num_microbatches=M,
            order=draw.choice(["ready", "fixed"]),
        )
        pipe.listen(lambda worker, run=run: _Late(f"{run} {worker}"))  # type: ignore[misc]
        losses, state = list(pipe.train(batches)), pipe.weights.state_dict()
        key = schedule, P, M, pipe.actors[0].max_grad_norm
        if key not in expected:
            expected[key] = _replayed(pipe, batches)
        assert state is not None
        right = expected[key]
        if losses != right[0] or not all(torch.equal(tensor, right[1][name]) for name, tensor in state.items()):
            differ += 1
            print(f"run {run} differs: {key}", flush=True)
        pipe.close()
    seconds = time.perf_counter() - begin
    print(f"{parsed.runs} runs over {len(expected)} settings, {seconds:.0f} s: {differ} differ from their replay")


def _replayed(pipe: Pipeline, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    randomness = Randomness(0)
    layers = [module for _, module in LayerPartition(_mlp(), 1).build(0, randomness)]
    clip = pipe.actors[0].max_grad_norm
    replay = replay_of(
        pipe.spec, layers, pipe.partition.ranges, nn.functional.mse_loss, _adamw, randomness, max_grad_norm=clip
    )
    return list(replay.train(batches)), replay.state_dict()


if __name__ == "__main__":
    main()
