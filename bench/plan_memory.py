"""Bytes of plans that are run: predicted, and measured by worker.

    python -m bench.plan_memory --model bert t5

Of the plans that `search` returns the fastest of different schedules are run on two workers. What a worker holds is
counted by torch's profiler in a step: parameters, gradients, activations, payloads, and what kernels need while they
run. Not counted, as the systems of this benchmark have none, is what an optimizer keeps.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from rpc_pipe.boards import run_folders
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.planning.measuring.profiling import load_user_model, profile_model, rows_of
from rpc_pipe.planning.plan import Plan
from rpc_pipe.planning.profile import LayerCost, Machines, Profile
from rpc_pipe.planning.search import PlanRequest, search

from . import group
from .measured_layers import measure_layers
from .models import Model, bert, ragged, resnet
from .plan_models import make_t5
from .systems import SYSTEMS, Job, Ours, Workload

#: plans that are run, each of another schedule
_PLANS = 4
_MODELS: dict[str, Callable[[int], Model]] = {"bert": bert, "resnet": resnet, "gpt": ragged}
_NAMES = (*_MODELS, "t5")


@dataclass(frozen=True)
class Case:
    """A model on two workers of one thread each; layers, or a module that is cut where its forward calls its blocks."""

    model: Model | None
    request: PlanRequest

    def layers(self) -> list[Callable[[], nn.Module]]:
        """Return what makes each layer."""
        assert self.model is not None
        return [partial(self.model._build, i) for i in range(len(self.model.layers))]


def case_of(name: str, count: int) -> Case:
    """Measure a model and return what is planned for it."""
    torch.set_num_threads(1)
    if name == "t5":
        made = load_user_model(f"{Path(__file__).parent / 'plan_models.py'}:make_t5")
        batch = rows_of(made.batch)
        profile = replace(profile_model(made, [batch // count], repeats=3), per_stage={})
        # As the others of this benchmark it updates nothing, so what an optimizer keeps is not there.
        blocks = {rows: [_without_optimizer(cost) for cost in costs] for rows, costs in profile.measured.items()}
        profile = replace(profile, measured=blocks, ties=tuple(replace(tie, optimizer=0) for tie in profile.ties))
        return Case(None, PlanRequest(profile, Machines(2), batch, (count,), seconds=8))
    model = _MODELS[name](count)
    modules = [model._build(i) for i in range(len(model.layers))]
    x, y = (model.padded or model.batch)(0)[0]
    costs = measure_layers(modules, x, target=y, loss_fn=model.loss, repeats=3)
    return Case(model, PlanRequest(Profile({1: costs}), Machines(2), count, (count,), seconds=8))


def _without_optimizer(cost: LayerCost) -> LayerCost:
    return replace(cost, size=replace(cost.size, optimizer=0))


class Weighed(Ours):
    """rpc-pipe, with the most bytes of tensors that the worker had in its second step, as torch's profiler counts."""

    def step(self) -> None:
        if self.done != 1:
            self._run()
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            self._run()
        kept = [p for actor in self._pipe.actors for shard in actor.shards.values() for p in shard.parameters()]
        held = sum(p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for p in kept)
        assert seen.profiler is not None
        changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        sums = accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns()))
        peak = held + max([0, *sums])
        path = Path(os.environ[run_folders.FOLDER]) / f"weighed-{self.rank}-{self.job.label}"
        path.write_text(str(peak))

    def _run(self) -> None:
        super().step()


class WeighedWhole(Weighed):
    """The same of a module, which rpc-pipe cuts."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.done = job, rank, 0
        model, self._batch = make_t5()
        self._pipe = Pipeline(model, plan=job.options)

    def _run(self) -> None:
        self._pipe.step(self._batch)
        self.done += 1

    def gradients(self) -> dict[int, list[Tensor]]:
        return {}


SYSTEMS |= {"weighed": Weighed, "weighed whole": WeighedWhole}


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
    if case.model is None:
        nothing = torch.zeros(1, 1)  # the systems of this benchmark are compared with one process: not this one
        whole = Workload(
            lambda index, count: nn.Linear(1, 1), nn.functional.mse_loss, lambda step: [(nothing, nothing)]
        )
        return Job(
            "weighed whole", plan.schedule, plan.num_workers, plan.num_microbatches, whole, 1, 2, len(plan.cut),
            plan.as_json(), label,
        )  # fmt: skip
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
    parser.add_argument("--model", nargs="+", choices=_NAMES, default=_NAMES, help="which (all)")
    options = parser.parse_args()
    for name in options.model:
        case = case_of(name, 8)
        plans: dict[tuple[str, bool], Plan] = {}
        for plan in search(case.request).plans:
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
