"""rpc-pipe's replicas against torch.distributed.pipelining with DDP and with FSDP2, and against one pipeline.

    python bench/data_parallel.py [--only emulated,gpt,resnet] [--rounds N] [--json FILE]

Four workers: 2 stages x 2 replicas, or one pipeline of 4 stages; 8 microbatches, 1F1B, AdamW, one thread each. Systems
take turns (A B C A B C ...), with the same modules, weights, data and cut. Before a system is timed, the gradients of
its first step are compared with those of one process. A step's time is the median over the steps of a training loop,
update included. A ratio says how many times as fast the first is.

emulated: devices that take 20 and 40 ms a stage, and an uplink of each worker over which a stage's gradients take 40
ms. It sends one payload after the other, and of a collective what a ring sends. gpt, resnet: computed by this machine.
`plan` is asked which is faster, two replicas or one pipeline: of the emulated times and bytes, or of what it measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import devices
from bench.models import Model, bytewise_gpt, resnet, stage_cost
from bench.planned import plans
from bench.scenarios import Contest
from bench.systems import SYSTEMS, Job, Ours, System, TorchPipelining, Workload, meeting, whole
from bench.uplink import Uplink
from bench.vs_pippy import run
from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import B, F, U
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.profile import LayerCost, Machines, Profile
from rpc_pipe.planning.search import PlanRequest, search

_STAGES, _REPLICAS, _MICROBATCHES, _STEPS = 2, 2, 8, 8
_WORKERS = _STAGES * _REPLICAS
_FORWARD_MS, _BACKWARD_MS, _LINK_MS, _PARTS = 20, 40, 40, 24
#: of one part of the emulated model, which AdamW takes
_UPDATE_MS = 0.05
_OPTIMIZER = partial(torch.optim.AdamW, lr=1e-6)
#: MiB
_BUCKET = 25.0


@dataclass(frozen=True)
class Connected(Workload):
    """A workload, and how replicas exchange gradients."""

    #: bytes a second that a worker sends to other replicas; None: over what this machine has
    uplink: float | None = None
    #: MiB
    bucket: float = _BUCKET


class Replicas(Ours):
    """rpc-pipe in a training loop."""

    def __init__(self, job: Job, rank: int) -> None:
        System.__init__(self, job, rank)
        workload, count = job.workload, job.num_stages
        assert isinstance(workload, Connected)
        if workload.uplink:
            Uplink(workload.uplink).carry_ours()
        self._pipe = Pipeline(
            [partial(workload.stage, index, count) for index in range(count)],
            workload.loss,
            training=Training(optimizer=_OPTIMIZER),
            num_microbatches=job.microbatches,
            schedule_options=job.options | ({"bucket": workload.bucket} if job.options else {}),
            split=[1] * count,
        )
        self._first: dict[int, list[Tensor | None]] = {}
        self._pipe.on_gradients((rank // job.options.get("replicas", 1)), partial(self._keep, rank))
        batch = workload.batch(0)
        self._losses: Any = self._pipe.train(repeat((whole(*(x for x, _ in batch)), whole(*(y for _, y in batch)))))

    def _keep(self, rank: int, parameters: Mapping[str, nn.Parameter]) -> None:
        stage = rank // self.job.options.get("replicas", 1)
        if stage not in self._first:
            self._first[stage] = [None if p.grad is None else p.grad.clone() for p in parameters.values()]

    def step(self) -> None:
        next(self._losses)

    def gradients(self) -> dict[int, Any]:
        return self._first

    def close(self) -> None:
        self._losses.close()
        super().close()


class _TorchReplicas(TorchPipelining):
    """torch.distributed.pipelining on the replica's own microbatches, and what sums the gradients of a stage."""

    def __init__(self, job: Job, rank: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        System.__init__(self, job, rank)
        dist.init_process_group("gloo", rank=rank, world_size=job.workers, init_method=meeting(1))
        mesh = init_device_mesh("cpu", (_STAGES, _REPLICAS), mesh_dim_names=("pp", "dp"))
        self._stage, self._replica = divmod(rank, _REPLICAS)
        workload = job.workload
        assert isinstance(workload, Connected)
        self._uplink = Uplink(workload.uplink) if workload.uplink else None
        module = self._wrapped(workload.stage(self._stage, _STAGES), mesh["dp"], workload.bucket)
        stage = PipelineStage(module, self._stage, _STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
        self._schedule = Schedule1F1B(stage, job.microbatches // _REPLICAS, loss_fn=workload.loss)
        self._optimizer, self._module = _OPTIMIZER(module.parameters()), module

    def _wrapped(self, stage: nn.Module, mesh: Any, bucket: float) -> nn.Module:
        raise NotImplementedError

    def step(self) -> None:
        batch = self.job.workload.batch(0)[self._replica :: _REPLICAS]
        self._optimizer.zero_grad()
        inputs = (whole(*(x for x, _ in batch)),) if self._stage == 0 else ()
        target = whole(*(y for _, y in batch)) if self._stage == _STAGES - 1 else None
        self._schedule.step(*inputs, target=target, return_outputs=False)
        self._optimizer.step()

    def gradients(self) -> dict[int, list[Tensor]]:
        found = [p.grad for p in self._module.parameters() if p.grad is not None]
        return {self._stage: [getattr(grad, "full_tensor", grad.clone)() for grad in found]}


class WithDDP(_TorchReplicas):
    """Gradients are averaged bucket by bucket from within the last backward. Buffers stay each replica's own."""

    def _wrapped(self, stage: nn.Module, mesh: Any, bucket: float) -> nn.Module:
        group = mesh.get_group()
        module = DistributedDataParallel(
            stage, process_group=group, bucket_cap_mb=bucket, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        if self._uplink is not None:
            average = self._uplink.average
            module.register_comm_hook(group, lambda group, bucket: average(group, bucket))
        return module


class WithFSDP2(_TorchReplicas):
    """Each layer's parameters are sharded, and gathered once a step, as torchtitan does in a pipeline."""

    def _wrapped(self, stage: nn.Module, mesh: Any, bucket: float) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for module in (*stage.children(), stage):
            if any(p.requires_grad for p in module.parameters()):
                fully_shard(module, mesh=mesh, reshard_after_forward=False)
        for sharded in stage.modules():
            if isinstance(sharded, FSDPModule) and self._uplink is not None:
                sharded.set_custom_all_gather(self._uplink.gather())
                sharded.set_custom_reduce_scatter(self._uplink.scatter())
        return stage


_OURS, _DDP, _FSDP2 = "rpc-pipe in a loop", "torch + DDP", "torch + FSDP2"
SYSTEMS |= {_OURS: Replicas, _DDP: WithDDP, _FSDP2: WithFSDP2}
_TWO, _ZERO, _ONE = "2 x 2", "2 x 2, zero 1", "one pipeline"


def contest(name: str, workload: Connected, cost: Callable[[Job], Any], steps: int = _STEPS) -> Contest:
    """Return the jobs of all systems."""

    def job(system: str, label: str, stages: int, **options: Any) -> Job:
        return Job(system, "1f1b", _WORKERS, _MICROBATCHES, workload, 2, steps, stages, options, label)

    jobs = [
        job(_OURS, _TWO, _STAGES, replicas=_REPLICAS),
        job(_DDP, _TWO, _STAGES, replicas=_REPLICAS),
        job(_OURS, _ZERO, _STAGES, replicas=_REPLICAS, zero=1),
        job(_FSDP2, _TWO, _STAGES, replicas=_REPLICAS),
        job(_OURS, _ONE, _WORKERS),
    ]
    return Contest(name, jobs, cost)


def _even(num_layers: int, count: int) -> list[int]:
    return [num_layers // count] * count


def emulated(steps: int = _STEPS, speed: float = 1) -> tuple[Contest, list[float]]:
    """Return a contest of devices and links that are `speed` times as fast, and what `plan` says of it."""
    times = {F: _FORWARD_MS * _STAGES / _PARTS / speed, B: _BACKWARD_MS * _STAGES / _PARTS / speed}
    each = [devices.Times(ms / 1e3, 1) for ms in times.values()]
    one = 4.0 * devices.WIDTH
    uplink = one * _PARTS / _STAGES / _LINK_MS * 1e3 * speed

    def stage(index: int, count: int) -> nn.Module:
        parts = _PARTS // count
        return nn.Sequential(*[devices.Device(*each, part=part, parts=parts) for part in range(parts)])

    batch = [(x.detach(), y) for x, y in devices.batch(_MICROBATCHES)]
    workload = Connected(stage, nn.functional.mse_loss, lambda _: batch, uplink=uplink, bucket=one / 2**20)
    bucket = _BUCKET * 2**20  # `plan` has buckets of this size, so for it everything is so much larger
    layers = [LayerCost({**times, U: _UPDATE_MS}, Size(weights=bucket, gradients=bucket))] * _PARTS
    machines = Machines(_WORKERS, uplinks=dict.fromkeys(range(_WORKERS), uplink / 1e3 * bucket / one))
    request = PlanRequest(Profile({1: layers}), machines, _MICROBATCHES, (_MICROBATCHES,), False, ("1f1b",))

    def cost(job: Job) -> Any:
        share = _PARTS // job.num_stages
        return lambda action: share * times.get(action.kind, 0)

    return contest("emulated", workload, cost, steps), [
        search(PlanRequest(**{**vars(request), "replicas": (n,)})).plans[0].predicted_ms for n in (_REPLICAS, 1)
    ]


def real(model: Model, make: str) -> tuple[Contest, list[float]]:
    """Return a contest of a model that is cut as `plan` says, and what it says."""
    found = plans(make, _WORKERS, _MICROBATCHES, "--replicas", f"{_REPLICAS},1", "--schedule", "1f1b")
    best = [next(p for p in found if p["parameters"].get("replicas", 1) == n) for n in (_REPLICAS, 1)]
    cuts: dict[int, Sequence[int]] = {len(plan["cut"]): plan["cut"] for plan in best}
    cut = model.workload(cuts.__getitem__)
    workload, costs = Connected(cut.stage, cut.loss, cut.batch), model.costs()
    made = contest(model.name, workload, lambda job: stage_cost(costs, cuts[job.num_stages]))
    return made, [plan["predicted_ms"] for plan in best]


CONTESTS: dict[str, Callable[[], tuple[Contest, list[float]]]] = {
    "emulated": emulated,
    "gpt": lambda: real(bytewise_gpt(_MICROBATCHES), "make_bytewise_gpt"),
    "resnet": lambda: real(resnet(_MICROBATCHES), "make_resnet"),
}


def rows_of(made: tuple[Contest, list[float]], rounds: int) -> list[dict[str, Any]]:
    """Run a contest and return its rows, the first with the ratios of all."""
    rows, (two, one) = run(made[0], rounds, None), made[1]
    for row, planned in zip(rows, (two, None, None, None, one), strict=True):
        row |= {} if planned is None else {"plan_ms": planned}
    rows[0]["ratios"] = dict(ratios(rows))
    return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield (who against whom, how many times as fast the first is)."""
    ms: dict[Any, float] = {(row["system"], row["schedule"]): row["median_ms"] for row in rows if "failure" not in row}
    peers = (_DDP, _TWO), (_FSDP2, _TWO)
    pairs = [(ours, peer) for ours in (_TWO, _ZERO) for peer in peers] + [(_TWO, (_OURS, _ONE))]
    for ours, other in pairs:
        if (_OURS, ours) in ms and other in ms:
            yield f"rpc-pipe {ours} against {' '.join(other)}", ms[other] / ms[_OURS, ours]


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a contest: a table, who wins, and whether `plan` has foreseen it."""
    table = Table(title=f"{rows[0]['scenario']}, 4 workers, {_MICROBATCHES} microbatches", title_justify="left")
    for column in ("system", "", "step ms", "quartiles", "plan", "CPU ms", "RSS MB"):
        table.add_column(column, justify="left" if column in ("system", "") else "right")
    for row in rows:
        if "failure" in row:
            table.add_row(row["system"], row["schedule"], "failed", row["failure"].strip().splitlines()[-1])
            continue
        low, high = row["quartiles_ms"]
        planned = f"{row['plan_ms']:.1f}" if "plan_ms" in row else ""
        table.add_row(
            row["system"], row["schedule"], f"{row['median_ms']:.1f}", f"{low:.1f} - {high:.1f}", planned,
            f"{row['cpu_ms']:.0f}", f"{row['peak_rss_mb']:.0f}",
        )  # fmt: skip
    console.print(table)
    for who, ratio in rows[0]["ratios"].items():
        console.print(f"{who}: {ratio:.2f}")
    both = [(row["plan_ms"], row.get("median_ms", 0)) for row in rows if "plan_ms" in row and "failure" not in row]
    if len(both) == 2:
        foreseen = (both[0][0] < both[1][0]) == (both[0][1] < both[1][1])
        console.print(f"plan foresees which is faster: {'yes' if foreseen else 'no'}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CONTESTS), help=f"some of {','.join(CONTESTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system (3)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in CONTESTS]:
        parser.error(f"--only {unknown[0]}: must be some of {', '.join(CONTESTS)}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    everything: list[dict[str, Any]] = []
    for name in options.only.split(","):
        everything += (rows := rows_of(CONTESTS[name](), options.rounds))
        show(rows, console)
        if options.json:
            options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
