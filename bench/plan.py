"""Plans that are run: predicted, measured, and the best that was measured.

    python -m bench.plan                      all cases
    python -m bench.plan --case unequal slow  some of them
    python -m bench.plan --real               models whose compute is real, which needs a quiet machine

Emulated devices sleep as long as they are told, one thread a worker, so that many fit on few cores: blocks of random
length, unequal workers, tight memory, recomputation. Of the plans that `search` returns the best of the fastest
schedules are run for a few steps in turn, median of each; `best` is the fastest that was measured. Milliseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from rpc_pipe.dependency import B, F, I, R, U, W
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.plan import Plan
from rpc_pipe.planning.profile import LayerCost, Machines, Profile
from rpc_pipe.planning.search import Question, search

from . import devices, group
from .devices import Device, Times
from .models import bert, resnet
from .systems import Job, Workload

#: plans that are run, each of another schedule
_PLANS = 3
_STEPS = 3
_ROUNDS = 1


@dataclass(frozen=True)
class Case:
    """A model on machines, and how it is run."""

    name: str
    question: Question
    layers: Callable[[Plan], Sequence[Callable[[], nn.Module]]]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], list[tuple[Tensor, Tensor]]]


def emulated(name: str, seed: int, num_blocks: int, num_workers: int, count: int, **machines: Any) -> Case:
    """Return a case of blocks whose F, I and W take 10 to 30 ms: long against what a busy machine oversleeps."""
    draw = random.Random(seed)
    units = [draw.choice((10.0, 12.0, 20.0, 30.0)) for _ in range(num_blocks)]
    blocks = []
    for i, unit in enumerate(units):
        times = {F: unit, I: unit, W: unit, B: 2 * unit, R: unit, U: 0.0}
        blocks.append(LayerCost(times, Size(100, 100, 200, 1000, 500, 256, 256), f"{i}"))
    asked = Machines(num_workers, **machines)
    question = Question(Profile({1: blocks}), asked, count, (count,), recompute=False, seconds=8)

    def layers(plan: Plan) -> list[Callable[[], nn.Module]]:
        slow = _slowness(plan, asked)
        return [partial(_device, unit, slow[i]) for i, unit in enumerate(units)]

    return Case(name, question, layers, nn.functional.mse_loss, devices.batch)


def _slowness(plan: Plan, machines: Machines) -> list[float]:
    """Return how slow the worker of each block is, for plans with one replica."""
    from rpc_pipe.planning.candidates import Candidate

    spec = Candidate(plan.schedule, plan.parameters, plan.num_microbatches).spec(machines.num_workers)
    return [machines.slow(spec.place(stage, 0)) for stage, size in enumerate(plan.cut) for _ in range(size)]


def _device(unit: float, slow: float) -> nn.Module:
    seconds = [unit * slow / 1e3]
    times = Times(0, 0)
    times.of = seconds
    return Device(times, times, times)


def cases() -> Iterator[Case]:
    """Yield the emulated cases."""
    yield emulated("equal", 0, 8, 4, 4)
    yield emulated("unequal", 1, 8, 4, 4, slowness=(1, 2, 1, 1.5))
    yield emulated("two", 2, 7, 2, 4, slowness=(1, 3))
    yield emulated("memory", 3, 8, 4, 4, memory=(8_000, 8_000, 8_000, 8_000))
    yield emulated("many", 4, 8, 4, 8)
    yield emulated("uneven", 5, 9, 3, 6)


def real(model: Any, count: int) -> Case:
    """Return a case of a model of `bench.models`, on two workers of one thread each."""
    from rpc_pipe.planning.measure import measure

    torch.set_num_threads(1)
    modules = [model._build(i) for i in range(len(model.layers))]
    x, y = model.batch(0)[0]
    costs = measure(modules, x, target=y, loss_fn=model.loss, repeats=7)
    question = Question(Profile({1: costs}), Machines(2), count, (count,), recompute=False, seconds=8)

    def layers(plan: Plan) -> list[Callable[[], nn.Module]]:
        return [partial(model._build, i) for i in range(len(model.layers))]

    return Case(model.name, question, layers, model.loss, lambda _: model.batch(0))


def measured(case: Case, plans: Sequence[Plan]) -> list[tuple[float, str]]:
    """Return the median time of a step of each plan, run in turn by processes, or why there is none."""
    jobs = []
    for plan in plans:
        layers = case.layers(plan)
        ends = [0, *accumulate(plan.cut)]

        def stage(index: int, count: int, layers: Any = layers, ends: Any = ends) -> nn.Module:
            return nn.Sequential(*(layer() for layer in layers[ends[index] : ends[index + 1]]))

        workload = Workload(stage, case.loss, lambda _, plan=plan: case.batch(plan.num_microbatches))  # type: ignore[misc]
        jobs.append(
            Job("rpc-pipe", plan.schedule, plan.num_workers, plan.num_microbatches, workload, 1, _STEPS, len(plan.cut),
                plan.schedule_options)
        )  # fmt: skip
    jobs = jobs * _ROUNDS
    with TemporaryDirectory() as folder:
        group.run(jobs, Path(folder), range(max(job.workers for job in jobs)))
        ran = [group.outcomes(job, number, Path(folder)) for number, job in enumerate(jobs)]
    found = []
    for at in range(len(plans)):
        same = [outcomes for number, outcomes in enumerate(ran) if number % len(plans) == at]
        failures = [o.failure for outcomes in same for o in outcomes if o.failure]
        # A step is over when its last worker is done.
        steps = [max(step) for outcomes in same for step in zip(*(o.step_ms for o in outcomes), strict=True)]
        found.append((statistics.median(steps) if steps else 0.0, failures[0] if failures else ""))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", help="names of cases (all)")
    parser.add_argument("--real", action="store_true", help="models whose compute is real")
    parser.add_argument(
        "--quiet", action="store_true", help="nothing else runs here: measure by how much sleeps are late"
    )
    options = parser.parse_args()
    if not options.quiet:
        devices.assume(0.0001)  # what is measured on a busy machine is not true
    chosen: Iterator[Case] = cases()
    if options.real:
        chosen = (real(model(8), 8) for model in (bert, resnet))
    print(f"{'case':<9}{'plan':<22}{'predicted':>10}{'measured':>10}{'off':>7}{'best':>10}  {'proven'}")
    for case in chosen:
        if options.case and case.name not in options.case:
            continue
        answer = search(case.question)
        plans: dict[str, Plan] = {}
        for plan in answer.plans:
            one_copy = plan.schedule not in ("chimera", "mixpipe", "dualpipe")
            if one_copy and len(plans) < _PLANS:
                plans.setdefault(plan.schedule, plan)
        ran = measured(case, list(plans.values()))
        best = min((took for took, failure in ran if not failure), default=0.0)
        for plan, (took, failure) in zip(plans.values(), ran, strict=True):
            if failure:
                print(f"{case.name:<9}{plan.name:<22}{failure.strip().splitlines()[-1]}")
                continue
            off = plan.predicted_ms / took - 1
            print(
                f"{case.name:<9}{plan.name:<22}{plan.predicted_ms:10.2f}{took:10.2f}{off:+7.1%}{best:10.2f}  "
                f"{'yes' if answer.gap < 1e-9 else f'gap {answer.gap:.1%}'}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
