"""Bytes of plans that are run: predicted, and measured by worker.

    python -m bench.plan_memory --model bert resnet

Of the plans that `search` returns the fastest of different schedules are run on two workers. What a worker holds is
counted by torch's profiler in a step: parameters, gradients, activations, payloads, and what kernels need while they
run. Not counted, as the systems of this benchmark have none, is what an optimizer keeps.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from rpc_pipe.planning.measure import measure
from rpc_pipe.planning.plan import Plan
from rpc_pipe.planning.profile import Machines, Profile
from rpc_pipe.planning.search import Question, search
from rpc_pipe.tracing import run_folders

from . import group
from .models import Model, bert, ragged, resnet
from .systems import SYSTEMS, Job, Ours, Workload

#: plans that are run, each of another schedule
_PLANS = 4
_MODELS: dict[str, Callable[[int], Model]] = {"bert": bert, "resnet": resnet, "gpt": ragged}


@dataclass(frozen=True)
class Case:
    """A model on two workers of one thread each."""

    model: Model
    question: Question

    def layers(self) -> list[Callable[[], nn.Module]]:
        """Return what makes each layer."""
        return [partial(self.model._build, i) for i in range(len(self.model.layers))]


def case_of(model: Model, count: int) -> Case:
    """Measure a model and return what is planned for it."""
    torch.set_num_threads(1)
    modules = [model._build(i) for i in range(len(model.layers))]
    x, y = (model.padded or model.batch)(0)[0]
    costs = measure(modules, x, target=y, loss_fn=model.loss, repeats=3)
    return Case(model, Question(Profile({1: costs}), Machines(2), count, (count,), seconds=8))


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
    jobs = [_job(case, plan, str(number)) for number, plan in enumerate(plans)]
    found = []
    with TemporaryDirectory() as folder:
        group.run(jobs, Path(folder), range(max(job.workers for job in jobs)))
        for number, job in enumerate(jobs):
            paths = [Path(folder) / f"weighed-{rank}-{number}" for rank in range(job.workers)]
            found.append([float(path.read_text()) if path.exists() else 0.0 for path in paths])
    return found


def _job(case: Case, plan: Plan, label: str) -> Job:
    layers, ends = case.layers(), [0, *accumulate(plan.cut)]

    def stage(index: int, count: int) -> nn.Module:
        return nn.Sequential(*(layer() for layer in layers[ends[index] : ends[index + 1]]))

    model = case.model
    workload = Workload(stage, model.loss, model.padded or model.batch, summed=model.summed)
    return Job(
        "weighed", plan.schedule, plan.num_workers, plan.num_microbatches, workload, 1, 2, len(plan.cut),
        plan.schedule_options, label,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=tuple(_MODELS), default=tuple(_MODELS), help="which (all)")
    options = parser.parse_args()
    for name in options.model:
        case = case_of(_MODELS[name](8), 8)
        plans: dict[tuple[str, bool], Plan] = {}
        for plan in search(case.question).plans:
            if plan.schedule not in ("chimera", "mixpipe", "dualpipe") and len(plans) < _PLANS:
                plans.setdefault((plan.schedule, bool(plan.recompute)), plan)
        chosen = list(plans.values())
        for plan, held in zip(chosen, weighed(case, chosen), strict=True):
            for worker, (predicted, used) in enumerate(zip(plan.memory_by_worker, held, strict=True)):
                off = f"{predicted / used - 1:+7.1%}" if used else "   none"
                print(
                    f"{name:<9}{plan.name:<30}worker {worker} {predicted / 1e6:9.2f} MB {used / 1e6:9.2f} MB {off}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
