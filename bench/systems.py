"""The systems that are compared, each behind the same three calls, made by every worker's process.

    system = Ours(workload, schedule, ...)      join the others, build this worker's part
    system.step()                               one forward and backward of a whole batch
    system.gradients()                          of this worker's stages, divided as a mean over microbatches

PiPPy 0.1.1 cannot update on today's torch, so none updates; gradients add up from step to step for all.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rpc_pipe.dependency import B, F
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec

#: no system, but what one can reach
BARE = "bare sockets"
#: (inputs, targets)
Microbatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss: the same for all systems."""

    #: makes stage `index` of `count`; the same weights whoever asks
    stage: Callable[[int, int], nn.Module]
    loss: Callable[[Any, Any], Any]
    #: microbatches of step 0, 1, ...
    batch: Callable[[int], list[Microbatch]]
    #: the same where every microbatch must have one shape
    padded: Callable[[int], list[Microbatch]] | None = None
    #: loss is (sum, weight) and batches differ in weight, rather than a mean over equal microbatches
    summed: bool = False
    #: in which order ours runs microbatches
    order: str = "given"


@dataclass(frozen=True)
class Job:
    """One system, asked to do one thing."""

    system: str
    schedule: str
    workers: int
    microbatches: int
    workload: Workload
    warm_up: int = 2
    steps: int = 8
    #: stages of the model; more than workers where a worker holds several
    stages: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    #: what the schedule is called in the table, if not by its name
    label: str = ""

    @property
    def num_stages(self) -> int:
        return self.stages or self.workers


class System(ABC):
    """One worker's end."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.done = 0

    @abstractmethod
    def step(self) -> None:
        """Run the next batch; returns when this worker's part is done."""

    @abstractmethod
    def gradients(self) -> dict[int, list[Tensor]]:
        """Return by stage the gradients of its parameters, in their order."""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Leave when all have come to this."""


class Ours(System):
    """rpc-pipe, through the class its users meet."""

    def __init__(self, job: Job, rank: int) -> None:
        from rpc_pipe.pipeline import Pipeline

        super().__init__(job, rank)
        count = job.num_stages
        self._pipe = Pipeline(
            [partial(job.workload.stage, index, count) for index in range(count)],
            job.workload.loss,
            num_microbatches=job.microbatches,
            schedule=job.schedule,
            schedule_options=job.options,
            split=[1] * count,
            microbatch_order=job.workload.order,
        )

    def step(self) -> None:
        self._pipe.step(microbatches=self.job.workload.batch(self.done))
        self.done += 1

    def gradients(self) -> dict[int, list[Tensor]]:
        return {
            stage: [p.grad for p in shard.parameters() if p.grad is not None]
            for actor in self._pipe.actors
            for (stage, route), shard in actor.shards.items()
            if route == 0
        }

    def close(self) -> None:
        self._pipe.barrier()
        self._pipe.actors[0].carrier.close()  # else done at exit, which a fork must skip


class OursByRpc(Ours):
    """rpc-pipe as if every worker were on a host of its own."""

    def __init__(self, job: Job, rank: int) -> None:
        os.environ["RPC_PIPE_SHARED_MEMORY"] = "off"
        super().__init__(job, rank)


class OursByZmq(OursByRpc):
    """The same over ZeroMQ."""

    def __init__(self, job: Job, rank: int) -> None:
        os.environ["RPC_PIPE_TRANSPORT"] = "zmq"
        super().__init__(job, rank)


class OursByPlainZmq(OursByZmq):
    """The same without proofs and encryption, which no user can ask for."""

    def __init__(self, job: Job, rank: int) -> None:
        from rpc_pipe.workers.transport.keys import Keys

        def nothing(*_: Any) -> None: ...

        for name in ("listen", "prove"):
            setattr(Keys, name, nothing)
        super().__init__(job, rank)


@lru_cache(maxsize=2)
def whole(*microbatches: Tensor) -> Tensor:
    """Return a batch as others take it; where all steps have the same, it is put together before they are timed."""
    return torch.cat(microbatches)


class TorchPipelining(System):
    """torch.distributed.pipelining, PiPPy's heir, on gloo."""

    def __init__(self, job: Job, rank: int) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        super().__init__(job, rank)
        dist.init_process_group("gloo", rank=rank, world_size=job.workers, init_method=meeting(1))
        cls = getattr(schedules, f"Schedule{job.schedule}")
        count, workers = job.num_stages, job.workers
        if job.schedule in ("ZBVZeroBubble", "DualPipeV"):
            own = [rank, 2 * workers - 1 - rank]
        else:
            own = list(range(rank, count, workers))
        self._modules = {index: job.workload.stage(index, count) for index in own}
        stages = [PipelineStage(module, i, count, torch.device("cpu")) for i, module in self._modules.items()]
        single = issubclass(cls, schedules.PipelineScheduleSingle)
        loss: Any = job.workload.loss
        if job.workload.summed:
            loss = _only_sum(loss)
        self._schedule = cls(
            stages[0] if single else stages, job.microbatches, loss_fn=loss, scale_grads=not job.workload.summed
        )
        self._first, self._last = 0 in own, count - 1 in own

    def step(self) -> None:
        batch = (self.job.workload.padded or self.job.workload.batch)(self.done)
        inputs = whole(*(x for x, _ in batch)) if self._first else None
        if inputs is not None and batch[0][0].requires_grad:
            inputs = inputs.detach().requires_grad_()
        target = whole(*(y for _, y in batch)) if self._last else None
        self._schedule.step(*(() if inputs is None else (inputs,)), target=target, return_outputs=False)
        self.done += 1

    def gradients(self) -> dict[int, list[Tensor]]:
        scale = total_weight(self.job.workload)
        return {i: [p.grad / scale for p in m.parameters() if p.grad is not None] for i, m in self._modules.items()}

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class BareSockets(System):
    """A loop written by hand over bare sockets, one stage a worker, in the order that the simulator finds."""

    def __init__(self, job: Job, rank: int) -> None:
        from .bare import neighbours

        super().__init__(job, rank)
        spec = make_spec(job.schedule, job.workers, job.microbatches, job.options)
        self._order = simulate(spec, uniform({F: 1, B: 2})).orders()[rank]
        self._module = job.workload.stage(rank, job.workers)
        dist.init_process_group("gloo", rank=rank, world_size=job.workers, init_method=meeting(1))
        self._before, self._after = neighbours(rank, job.workers, job.workload.batch(0)[0][0].detach())

    def step(self) -> None:
        batch, begun = self.job.workload.batch(self.done), {}
        for action in self._order:
            m = action.index
            if action.kind is F:
                x = batch[m][0] if self._before is None else self._before.get().requires_grad_()
                y = self._module(x)
                if self._after is None:
                    y = self.job.workload.loss(y, batch[m][1]) / len(batch)
                else:
                    self._after.put(y)
                begun[m] = x, y
                continue
            x, y = begun.pop(m)
            y.backward(None if self._after is None else self._after.get())
            if self._before is not None:
                assert x.grad is not None
                self._before.put(x.grad)
        self.done += 1

    def gradients(self) -> dict[int, list[Tensor]]:
        return {self.rank: [p.grad for p in self._module.parameters() if p.grad is not None]}

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class Pippy(System):
    """torchpippy 0.1.1, the last with the RPC driver: worker 0 drives, the others serve."""

    def __init__(self, job: Job, rank: int) -> None:
        import pippy.fx
        from pippy.IR import Pipe, PipeSplitWrapper, TrivialLossWrapper, annotate_split_points
        from pippy.PipelineDriver import PipelineDriver1F1B, PipelineDriverFillDrain
        from torch.distributed import rpc

        super().__init__(job, rank)
        # The options of its run_pippy. Fewer threads deadlock it; the uv transport was slower at 8 workers (measured).
        dist.init_process_group("gloo", rank=rank, world_size=job.workers, init_method=meeting(1))
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=job.workers,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                num_worker_threads=512, rpc_timeout=600, init_method=meeting(2)
            ),
        )
        if rank > 0:
            return
        stages = [_Leaf(job.workload.stage(index, job.workers)) for index in range(job.workers)]
        model = nn.Sequential(*stages)
        annotate_split_points(model, {str(i): PipeSplitWrapper.SplitPoint.BEGINNING for i in range(1, job.workers)})

        class Tracer(pippy.fx.Tracer):  # type: ignore[misc]
            def is_leaf_module(self, module: nn.Module, name: str) -> bool:
                return isinstance(module, _Leaf) or super().is_leaf_module(module, name)

        loss: Any = job.workload.loss
        wrapped = TrivialLossWrapper(model, _only_sum(loss) if job.workload.summed else loss)
        pipe = Pipe.from_tracing(wrapped, tracer=Tracer(), output_loss_value_spec=True)
        driver = {"1F1B": PipelineDriver1F1B, "FillDrain": PipelineDriverFillDrain}[job.schedule]
        self._driver = driver(pipe, job.microbatches, job.workers)

    def step(self) -> None:
        if self.rank == 0:
            batch = (self.job.workload.padded or self.job.workload.batch)(self.done)
            inputs = whole(*(x for x, _ in batch)).detach().requires_grad_(batch[0][0].requires_grad)
            self._driver(inputs, whole(*(y for _, y in batch)))
        self.done += 1

    def gradients(self) -> dict[int, list[Tensor]]:
        from torch.distributed import rpc

        if self.rank > 0:
            return {}
        found = {}
        for stage, executor in self._driver.stage_to_executor.items():
            found[stage] = rpc.rpc_sync(executor.owner(), _gradients_of, args=(executor,))
        scale = total_weight(self.job.workload) if self.job.workload.summed else self.job.microbatches
        return {stage: [gradient / scale for gradient in gradients] for stage, gradients in found.items()}

    def close(self) -> None:
        from torch.distributed import rpc

        with suppress(RuntimeError):  # its workers wait for each other at the store of the one that left first
            rpc.shutdown()


class _Leaf(nn.Module):
    """Keeps PiPPy's tracer out of a stage."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def _gradients_of(executor: Any) -> list[Tensor]:
    return [p.grad for p in executor.local_value().mod.parameters() if p.grad is not None]


def _only_sum(loss: Callable[[Any, Any], tuple[Tensor, Any]]) -> Callable[[Any, Any], Tensor]:
    def summed(output: Any, target: Any) -> Tensor:
        return loss(output, target)[0]

    return summed


def meeting(number: int) -> str:
    """Where the workers meet: a file, or a port of the first host."""
    meeting = os.environ["BENCH_MEETING"]
    return f"{meeting}-{number}" if meeting.startswith("file:") else f"tcp://{meeting}{number}"


SYSTEMS: dict[str, type[System]] = {
    "rpc-pipe": Ours,
    "rpc-pipe by RPC": OursByRpc,
    "rpc-pipe by ZeroMQ": OursByZmq,
    "rpc-pipe by ZeroMQ without CURVE": OursByPlainZmq,
    BARE: BareSockets,
    "torch": TorchPipelining,
    "pippy": Pippy,
}


def absent(system: str) -> str | None:
    """Return why `system` cannot take part, None if it can."""
    if system == "pippy" and find_spec("pippy") is None:
        return "torchpippy is not installed: pip install torchpippy==0.1.1"
    return None


def total_weight(workload: Workload) -> float:
    """Return what the first batch's summed losses are divided by; 1 where losses are means."""
    if not workload.summed:
        return 1
    # The weight depends on the targets alone, so any output of their shape will do.
    return float(sum(workload.loss(torch.zeros(*y.shape, 1).expand(*y.shape, 256), y)[1] for _, y in workload.batch(0)))


def reference(workload: Workload, num_stages: int) -> dict[int, list[Tensor]]:
    """Return the gradients of one process that runs the whole model, by stage."""
    stages: Sequence[nn.Module] = [workload.stage(index, num_stages) for index in range(num_stages)]
    batch, weight = workload.batch(0), total_weight(workload)
    for x, y in batch:
        loss = workload.loss(nn.Sequential(*stages)(x), y)
        (loss[0] / weight if workload.summed else loss / len(batch)).backward()
    return {i: [p.grad for p in m.parameters() if p.grad is not None] for i, m in enumerate(stages)}
