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
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from rpc_pipe.tracing import run_folders

from . import devices, group
from .devices import Device, Times
from .models import bert, resnet
from .systems import SYSTEMS, Job, Ours, Workload

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


class Weighed(Ours):
    """rpc-pipe, with the most bytes of tensors that the worker had in its second step, as torch's profiler counts."""

    def step(self) -> None:
        if self.done != 1:
            super().step()
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            super().step()
        kept = [p for actor in self._pipe.actors for shard in actor.shards.values() for p in shard.parameters()]
        held = sum(p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for p in kept)
        assert seen.profiler is not None
        changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        sums = accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns()))
        peak = held + max([0, *sums])
        path = Path(os.environ[run_folders.FOLDER]) / f"weighed-{self.rank}-{self.job.label}"
        path.write_text(str(peak))


SYSTEMS["weighed"] = Weighed


def weighed(case: Case, plans: Sequence[Plan]) -> list[list[float]]:
    """Return the most bytes that each worker had with each plan."""
    jobs = [replace(job, system="weighed", label=str(number)) for number, job in enumerate(jobs_of(case, plans))]
    found = []
    with TemporaryDirectory() as folder:
        group.run(jobs, Path(folder), range(max(job.workers for job in jobs)))
        for number, job in enumerate(jobs):
            paths = [Path(folder) / f"weighed-{rank}-{number}" for rank in range(job.workers)]
            found.append([float(path.read_text()) if path.exists() else 0.0 for path in paths])
    return found


def jobs_of(case: Case, plans: Sequence[Plan]) -> list[Job]:
    """Return what is run."""
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
    return jobs


def measured(case: Case, plans: Sequence[Plan]) -> list[tuple[float, str]]:
    """Return the median time of a step of each plan, run in turn by processes, or why there is none."""
    jobs = jobs_of(case, plans)
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


def compare_memory(case: Case, plans: Sequence[Plan]) -> None:
    """Print bytes by worker, predicted and measured."""
    for plan, held in zip(plans, weighed(case, plans), strict=True):
        for worker, (predicted, used) in enumerate(zip(plan.memory_by_worker, held, strict=True)):
            off = f"{predicted / used - 1:+7.1%}" if used else "   none"
            print(
                f"{case.name:<9}{plan.name:<22}worker {worker} {predicted / 1e6:9.2f} MB {used / 1e6:9.2f} MB {off}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", help="names of cases (all)")
    parser.add_argument("--real", action="store_true", help="models whose compute is real")
    parser.add_argument("--memory", action="store_true", help="compare bytes instead of times; of models that are real")
    parser.add_argument("--quiet", action="store_true", help="nothing else runs here: measure how late sleeps are")
    options = parser.parse_args()
    if not options.quiet:
        devices.assume(0.0001)  # what is measured on a busy machine is not true
    chosen: Iterator[Case] = cases()
    if options.real or options.memory:
        chosen = (real(model(8), 8) for model in (bert, resnet))
    if not options.memory:
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
        if options.memory:
            compare_memory(case, list(plans.values()))
        else:
            compare_times(case, list(plans.values()), answer.gap)
    return 0


def compare_times(case: Case, plans: Sequence[Plan], gap: float) -> None:
    """Print milliseconds of a step, predicted and measured."""
    ran = measured(case, plans)
    best = min((took for took, failure in ran if not failure), default=0.0)
    for plan, (took, failure) in zip(plans, ran, strict=True):
        if failure:
            print(f"{case.name:<9}{plan.name:<22}{failure.strip().splitlines()[-1]}")
            continue
        off = plan.predicted_ms / took - 1
        sure = "yes" if gap < 1e-9 else f"gap {gap:.1%}"
        print(
            f"{case.name:<9}{plan.name:<22}{plan.predicted_ms:10.2f}{took:10.2f}{off:+7.1%}{best:10.2f}  {sure}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
