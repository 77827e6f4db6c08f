"""The rate of an elastic job after deaths, and after newcomers have come, on emulated devices; and as simulated.

    python bench/elastic.py [--shapes 2x2,2x3,3x3] [--schedules 1f1b,zb-h1,zb-v] [--dead 0] [--ms 40] [--steps 5]
                            [--rounds 1]

A shape is stages x replicas, each worker a process. A worker dies, and later a newcomer takes its place. A rate is the
median time of a step before the death, over that of a step in the epoch; of several rounds it is the median. The live
share is the live replicas of the stage over all of them. The simulation has the same times. A payload travels as long
as makes a step of devices that take no time, which is measured: a busy machine wakes processes late.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
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
from rpc_pipe.dependency import Action, Reductions
from rpc_pipe.dependency.relocating import relocated
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.specs import make_spec

#: microbatches of a replica, and steps of an epoch that are not measured
_EACH, _WARM_UP = 8, 3


class Stage(nn.Module):
    """An emulated device without a count of its microbatches, which a death would lose."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, devices.WIDTH))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Take `seconds`, and as long in each of the two parts of backward."""
        inputs: Tensor = devices._Path.apply(x, self._seconds, self._seconds)  # type: ignore[no-untyped-call]
        weight: Tensor = devices._Path.apply(self.weight, 0.0, self._seconds)  # type: ignore[no-untyped-call]
        return inputs + weight


def simulated(schedule: str, shape: str, dead: int, ms: float, travel: float) -> tuple[float, float]:
    """Return the time of a step with all workers, and without one, where a payload travels for `travel` ms."""
    stages, replicas = map(int, shape.split("x"))
    whole = make_spec(schedule, stages * replicas, _EACH * replicas, {"replicas": replicas})
    share = stages / whole.num_stages

    def cost(action: Action) -> float:
        return ms * share * {"F": 1, "B": 2, "I": 1, "W": 1}.get(action.kind.letter, 0)

    commits = Reductions(weight=True, norms=True, commits=True)
    first, then = (
        simulate(Relation(spec, 4, commits), cost, comm=travel, order=order).step_time
        for spec, order in ((whole, whole.order), (relocated(whole, frozenset({dead})), "ready"))
    )
    return first, then


def measured(schedule: str, shape: str, dead: int, ms: float, steps: int, rejoins: bool) -> tuple[float, float]:
    """Return the time of a step with all workers, and without one, or when a newcomer has come."""
    stages, replicas = map(int, shape.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        typed = ["--workers", stages * replicas, "--replicas", replicas, "--transport", "zmq", "--schedule", schedule]
        command = [sys.executable, "-m", "rpc_pipe", "run", __file__, *map(str, typed), "--elastic"]
        command += [*["--rejoin"] * rejoins, "--", "--be", folder, shape, str(dead), str(ms), str(steps)]
        subprocess.run([*command, str(int(rejoins))], check=True, stdout=subprocess.DEVNULL)
        before, *_, then = json.loads((Path(folder) / "ms").read_text())
        return float(before), float(then)


def _be(folder: str, shape: str, dead: str, ms: str, steps: str, rejoins: str) -> None:
    """Train as one of the processes; a live one writes the time of a step in each epoch."""
    torch.set_num_threads(1)
    devices.calibrate()
    stages, replicas = map(int, shape.split("x"))
    rank, enough = int(os.environ["RANK"]), int(steps) + _WARM_UP
    layers = int(os.environ.get("RPC_PIPE_LAYERS", 2 * stages))
    pipe = Pipeline(
        [partial(Stage, float(ms) / 1e3 * stages / layers)] * layers,
        nn.functional.mse_loss,
        training=Training(partial(torch.optim.AdamW, lr=1e-6)),
        num_microbatches=_EACH * replicas,
    )
    # Inputs owe a gradient, so that all stages work alike, as in the simulation.
    x = torch.randn(_EACH * replicas, devices.WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    epochs: list[list[float]] = []
    live, last, came_late, tells = 0, 0.0, pipe.replaying, rank == stages * replicas - 1
    for _ in pipe.train(itertools.repeat((x, x))):
        now = time.perf_counter()
        if pipe.replaying:
            continue
        if live != (live := len(pipe.actors[0].carrier.workers)):
            epochs.append([])
        epochs[-1].append(1e3 * (now - last))
        last = now
        if len(epochs) == 1 and len(epochs[0]) == enough and rank == int(dead) and not came_late:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(epochs) == 2 + int(rejoins) and len(epochs[-1]) == enough and tells:
            pipe.request_stop()
    if tells:
        Path(folder, "ms").write_text(json.dumps([statistics.median(each[_WARM_UP:] or each) for each in epochs]))


def main() -> None:
    if sys.argv[1:2] == ["--be"]:
        _be(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2x2,2x3,3x3")
    parser.add_argument("--schedules", default="1f1b,zb-h1,zb-v")
    parser.add_argument("--dead", type=int, default=0)
    parser.add_argument("--ms", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    typed = parser.parse_args()
    for shape, schedule in itertools.product(typed.shapes.split(","), typed.schedules.split(",")):
        replicas, job = int(shape.split("x")[1]), (schedule, shape, typed.dead)
        empty = statistics.median(measured(*job, 0.0, typed.steps, False)[0] for _ in range(typed.rounds))
        travel = empty / simulated(*job, 0.0, 1.0)[0]
        ideal, expected = simulated(*job, typed.ms, travel)
        deaths, joins = (
            [measured(*job, typed.ms, typed.steps, rejoins) for _ in range(typed.rounds)] for rejoins in (False, True)
        )
        after, back = (statistics.median(first / then for first, then in each) for each in (deaths, joins))
        step, longer = (statistics.median(times) for times in zip(*deaths, strict=True))
        apart = after * expected / ideal - 1
        print(
            f"{shape} {schedule:<6} travel {travel:.1f} ms, a step {step:.0f} ms (simulated {ideal:.0f}), "
            f"after a death {longer:.0f} ({expected:.0f}): rate {after:.3f} ({ideal / expected:.3f}, {apart:+.1%}), "
            f"{after * replicas / (replicas - 1):.2f} of the live share; after a join {back:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
