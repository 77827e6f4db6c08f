"""The face: a model that is trained by a pipeline of workers.

The same program works in three ways: alone, with all workers as threads of the process; as one of the
workers that `rpc-pipe run` or torchrun started, over RPC. All workers make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .checkpoints.keeper import Keeper, Restored
from .checkpoints.whole import save_whole
from .dependency import NOTHING, Asked, Entry, Order, Part, PipeError, Spec, check, entries
from .launching import launcher_link as link
from .launching import overrides
from .launching.job import own_part
from .launching.joining import join
from .model.arguments import describe, refuse_options, refuse_training, refuse_untrainable
from .model.microbatches import Ahead, Microbatches, join_rows
from .model.partition import Model, Partition
from .model.shards import ShardMaker
from .planning.specs import ScheduleLike, make_spec
from .workers.actor import WorkerActor
from .workers.compute.device import courier_for
from .workers.compute.randomness import Randomness, preserved
from .workers.compute.result import Result
from .workers.compute.shard import LossFn, OptimizerFactory, SchedulerFactory
from .workers.handlers import Batch
from .workers.hooks import Listener
from .workers.threads import WorkerThreads
from .workers.transport.call import Call
from .workers.transport.carrier import Carrier
from .workers.transport.local import local_carriers
from .workers.transport.payload import Tree

T = TypeVar("T")


class Pipeline:
    """A model cut into stages on several workers, trained by a schedule.

    Args:
        model: an `nn.Sequential`, a list of modules or of callables that build them, or a picklable builder
            (see `partition.Builder`). Each worker keeps only the layers of its own stages. Callables make
            initial weights independent of workers and cut.
        loss_fn: (output, target) -> mean over the microbatch, or (sum, weight): the step's loss is the sum
            over all microbatches divided by the sum of weights. A mean counts by its rows.
        optimizer: called with (name, parameter) pairs of a stage, by the unsplit model's names; such as
            `partial(torch.optim.AdamW, lr=3e-4)`, or a function that makes groups by name.
        lr_scheduler: optimizer -> learning-rate scheduler; stepped after every update.
        schedule: a name (`rpc-pipe schedules` lists them), `path/to/file.py:ClassName` or a Spec class.
        schedule_options: the schedule's parameters.
        num_microbatches: into how many microbatches a batch is split; fewer if it has fewer rows.
        num_workers: how many workers; inside a job the job decides, and else it is one. More are threads.
        split: number of layers of each stage; evenly by default.
        order: `ready` or `fixed`; the schedule's own preference by default. The result is the same.
        device: `cpu`, `cuda` or `cuda:N`.
        seed: of everything random: initial weights of layers given as callables, dropout.
        max_grad_norm: norm to which the gradients of the whole model are clipped before an update, with the bits of
            `torch.nn.utils.clip_grad_norm_`; see `grad_norm`.
        transport: between the processes of a job: `rpc` (by default) or `zmq`; `local`: one process has all workers.
        stall_s: how long nothing may arrive while a worker waits, before the run fails.

    Raises:
        ConfigError: an option that cannot work.
        ScheduleError: a schedule that cannot run; drawn.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: LossFn,
        *,
        num_microbatches: int,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        schedule: ScheduleLike = "1f1b",
        schedule_options: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        split: Sequence[int] | None = None,
        order: Order | None = None,
        device: str = "cpu",
        seed: int = 0,
        max_grad_norm: float | None = None,
        transport: str | None = None,
        stall_s: float = 300.0,
    ) -> None:
        said = schedule, schedule_options, num_microbatches, num_workers, split, order, device, seed, transport
        schedule, schedule_options, num_microbatches, num_workers, split, order, device, seed, transport = (
            overrides.settle(overrides.Settings(*said))
        )
        job, self.num_workers = own_part(transport, num_workers)
        refuse_options(order, max_grad_norm, num_workers=self.num_workers, num_microbatches=num_microbatches, seed=seed)
        refuse_training(loss_fn, optimizer, lr_scheduler)
        self.spec = make_spec(schedule, self.num_workers, num_microbatches, schedule_options)
        refuse_untrainable(self.spec)
        workers = [job.worker] if job else list(range(self.num_workers))
        for worker in workers:
            check(self.spec, worker)
        self.partition = Partition(model, self.spec.num_stages, split)
        self._order = order or self.spec.order
        self._plans: dict[int, Spec] = {}
        self._parts: dict[tuple[Spec, int, bool, Asked], Part] = {}
        # Whether the loss is given as sums, so that updates wait for its weight, is known after the first step.
        self._asked = Asked(weight=True, norms=max_grad_norm is not None)
        couriers = [courier_for(device) for _ in workers]
        maker = ShardMaker(
            self.partition,
            Randomness(seed, couriers[0].device),
            loss_fn=loss_fn,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        carriers: Sequence[Carrier] = [join(job)] if job else local_carriers(len(workers))
        made = zip(carriers, couriers, [maker.hosted(self.spec, worker) for worker in workers], strict=True)
        self._actors = [WorkerActor(*parts, max_grad_norm=max_grad_norm, stall_s=stall_s) for parts in made]
        # What all workers must have alike, and tell each other: the pipeline, and the replicas' initial weights.
        self.partition.release()
        self._described, self._weights = describe(self.spec, self.partition.ranges, seed), maker.weights
        self._threads = None if job else WorkerThreads(self._actors)
        self._worker = workers[0]
        self._stopped = self._closed = False
        self._grad_norm: float | None = None
        self._num_cut = 0
        self._keeper = Keeper(self._each, self.num_workers, {"pipeline": self._described, "seed": seed}, stall_s)
        link.attach(self)
        overrides.made(self)

    # --- what all workers call alike

    def step(self, batch: Tree | None = None, *, microbatches: Sequence[tuple[Tree, Tree]] | None = None) -> float:
        """Train on one batch and return its loss, on every worker.

        Args:
            batch: (inputs, targets), trees of tensors that share dimension 0, which is split into
                microbatches that differ by at most one row. Read where the first and last stage are, and one of
                `rpc_pipe.data.Loader` only there.
            microbatches: instead of a batch, a list of (inputs, targets) already split; shapes may differ.

        Raises:
            KeyboardInterrupt: the user asked to stop (Ctrl-C), and `stopped` has been True since the step before.
            Disagreement: the workers were given different batches, or make different calls.
            WorkerFailure: a worker raised, which this names. Where all workers are in this process, the step is
                undone, and the pipeline may be used as before it.
        """
        if self._stopped:
            raise KeyboardInterrupt("the step before was the last, as `pipe.stopped` says: end the loop on it")
        if self._keeper.results.behind:
            return self._keeper.results.answer("step")
        return self._told(self._run(self._cut(batch, microbatches), train=True))

    def train(self, batches: Iterable[Tree]) -> Iterator[float]:
        """Train on one batch after the other and yield the loss of each, on every worker.

        A step begins while the one before drains: the pipeline stays full. When a loss is yielded, the weights are
        those of its update on every worker, so the loop's body may evaluate and save; when the loop is left, what has
        been begun of the next batch is undone.

        Args:
            batches: each as for `step`; read one ahead.
        """
        batches = iter(batches)
        while self._keeper.results.behind and next(batches, batches) is not batches:
            yield self._keeper.results.answer("step")
        ahead = Ahead(batches, self._cut)
        streams = {actor: actor.stream(map(partial(self._batch, actor, train=True), ahead)) for actor in self._actors}
        try:
            for step in count():
                ahead.advance(step)
                result = None if self._stopped else self._each(lambda actor: next(streams[actor], None))[0]
                if result is None:
                    return
                ahead.finished(step)
                yield self._told(result)
        finally:
            if not self._closed:
                self._each(lambda actor: streams[actor].close())

    def evaluate(self, batch: Tree | None = None, *, microbatches: Sequence[tuple[Tree, Tree]] | None = None) -> float:
        """Return the loss of a batch without training on it, on every worker."""
        if self._keeper.results.behind:
            return self._keeper.results.answer("evaluate")
        result = self._run(self._cut(batch, microbatches), what="evaluate")
        assert result.loss is not None
        self._keeper.results.note("evaluate", result.loss)
        return result.loss

    def predict(self, inputs: Tree) -> Tree:
        """Return the model's output for `inputs`, on every worker, microbatches joined along dimension 0."""
        outputs = self._run(self._cut((inputs, None)), what="predict").outputs
        return join_rows([outputs[m] for m in sorted(outputs)])

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the whole model's tensors on worker 0, named as in the unsplit model; None elsewhere."""

        def own(actor: WorkerActor) -> dict[str, Tensor]:
            first_route = [shard for (_, route), shard in actor.shards.items() if route == 0]
            return {name: t for shard in first_route for name, t in shard.state_dict().items()}

        parts = self.gather("state", own)
        if parts is None:
            return None
        # Copies: of workers in this process these are the parameters themselves, and tied ones share storage,
        # which safetensors refuses.
        merged = {name: tensor.cpu().clone() for part in parts for name, tensor in part.items()}
        return {name: merged[name] for name in sorted(merged, key=_by_layer)}

    def save(self, path: str | Path) -> None:
        """Write the whole model as one safetensors file, from worker 0; complete or not at all."""
        state = self.state_dict()
        if state is not None:
            save_whole(state, path)

    def save_checkpoint(
        self, folder: str | Path, *, keep: int | None = None, extra: Any = None, wait: bool = True
    ) -> Path | None:
        """Write all that training needs to go on, as `folder/step-NNNNNNNN`; return its path where worker 0 is.

        Each worker writes its own part, so the folder must be one that all workers see.

        Args:
            keep: remove all but so many of the newest checkpoints in `folder`.
            extra: plain values to be kept with it.
            wait: whether to return when it is complete. Otherwise it is written beside training, and an error is
                raised by the next checkpoint or `close`.

        Raises:
            ConfigError: it cannot be written; checkpoints from before are as they were.
        """
        return self._keeper.save(Path(folder), keep, extra, wait)

    def load_checkpoint(self, folder: str | Path) -> Restored:
        """Go on from a checkpoint, or the newest complete one in `folder`, with all that it keeps.

        It may have been written by another number of workers, with another cut and schedule. The process's own random
        generators are put back too.

        Raises:
            ConfigError: it is damaged, or of another model or optimizer; nothing has changed.
        """
        return self._keeper.load(folder)

    def resume(self, folder: str | Path) -> Restored:
        """As `load_checkpoint`, for a script that makes all its calls anew, from the first one on.

        Its `step`, `evaluate` and `train` return what they did, without computing, until the script is where the
        checkpoint was made; batches are read and skipped.
        """
        return self._keeper.load(folder, anew=True)

    def checkpoint_every(self, steps: int, folder: str | Path, *, keep: int | None = None) -> None:
        """Write a checkpoint after every so many steps from here on, beside training."""
        self._keeper.every = steps, Path(folder), keep

    def gather(self, name: str, value: Callable[[WorkerActor], Tree]) -> list[Tree] | None:
        """Return `value(actor)` of all workers, in order, on worker 0; None on the others."""
        return self._each(lambda actor: actor.gather(name, value(actor)))[0]

    def barrier(self) -> None:
        """Return when every worker has called this."""
        self._each(WorkerActor.barrier)

    def close(self) -> None:
        """End the threads and let go of the model. A process of a job stays with the others until it ends."""
        if not self._closed:
            self._keeper.settle()
        if self._threads is not None:
            self._threads.close()
        self._threads, self._actors, self._closed = None, [], True

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- what one process has of its own

    @property
    def worker(self) -> int:
        """This process's worker; 0 if all workers are in it."""
        return self._worker

    @property
    def stopped(self) -> bool:
        """True once the user has asked to stop (Ctrl-C): end the loop. All workers see it after the same step."""
        return self._stopped

    @property
    def steps_done(self) -> int:
        """Training steps that the weights have behind them."""
        return self._actors[0].step

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients of the last step before they were clipped; None: they are not clipped."""
        return self._grad_norm

    @property
    def actors(self) -> list[WorkerActor]:
        """The workers of this process."""
        return self._actors

    @property
    def order(self) -> Order:
        """In what order workers run what is ready."""
        return self._order

    def program(self, worker: int, num_microbatches: int) -> list[Entry]:
        """Return what `worker` runs in a training step of so many microbatches."""
        actor = next(actor for actor in self._actors if actor.worker == worker)
        return self._part(self._spec_for(num_microbatches), actor, train=True).entries

    def shards(self, worker: int) -> list[tuple[int, int, int]]:
        """Return (stage, route, number of layers) of every shard that `worker` holds."""
        return [(stage, route, len(self.partition.ranges[stage])) for stage, route in self.spec.hosted(worker)]

    def listen(self, listener: Callable[[int], Listener]) -> None:
        """Add `listener(worker)` to every worker of this process."""
        for actor in self._actors:
            actor.listeners.add(listener(actor.worker))

    def request_stop(self) -> None:
        """Ask all workers to stop after the step that runs now. May be called from any thread."""
        for actor in self._actors:
            actor.stop_requested = True

    # --- inside

    def _cut(self, batch: Tree | None, microbatches: Sequence[tuple[Tree, Tree]] | None = None) -> Microbatches:
        self._num_cut += 1
        stages = {stage for actor in self._actors for stage, _ in actor.shards}
        used = 0 in stages, self.spec.last_stage in stages  # inputs and targets, by workers of this process
        return Microbatches.of(batch, microbatches, self.spec.num_microbatches, self._num_cut, used)

    def _run(self, batch: Microbatches, *, train: bool = False, what: str = "") -> Result:
        result = self._each(lambda actor: actor.run(self._batch(actor, batch, train, what)))[0]
        batch.finished()
        return result

    def _batch(self, actor: WorkerActor, batch: Microbatches, train: bool, what: str = "") -> Batch:
        """Return what `actor` is asked to do with `batch`."""
        part = self._part(self._spec_for(len(batch.inputs)), actor, train)
        targets = None if what == "predict" else batch.targets
        call = Call(
            actor.worker,
            what or f"step {actor.next_step}",
            self._described,
            *batch.described,
            self._weights if actor.next_step == 0 else "",
        )
        shape = batch.shares, train, self._asked, batch.rows, batch.tokens, batch.waited
        return Batch(part, self._order, call, batch.inputs, targets, *shape)

    def _told(self, result: Result) -> float:
        """Take note of what a training step came to; return its loss."""
        assert result.loss is not None
        self._stopped |= result.stop
        self._asked = self._asked._replace(weight=result.summed)
        self._grad_norm = result.norm
        self._keeper.results.note("step", result.loss)
        self._keeper.after(self.steps_done, result.stop)
        return result.loss

    def _spec_for(self, num_microbatches: int) -> Spec:
        if num_microbatches not in self._plans:
            spec = replace(self.spec, num_microbatches=num_microbatches)
            for actor in self._actors:
                check(spec, actor.worker)
            self._plans[num_microbatches] = spec
        return self._plans[num_microbatches]

    def _part(self, spec: Spec, actor: WorkerActor, train: bool) -> Part:
        asked = self._asked if train else NOTHING
        key = spec, actor.worker, train, asked
        if key not in self._parts:
            chained = {stage for (stage, _), shard in actor.shards.items() if shard.stateful and train}
            program = entries(spec, actor.worker, forward_only=not train, asked=asked, chained=chained)
            self._parts[key] = Part(spec, actor.worker, program)
        return self._parts[key]

    def _each(self, call: Callable[[WorkerActor], T]) -> list[T]:
        """Call for every worker of this process and raise the first cause."""
        if self._closed:
            raise PipeError("this pipeline is closed; `close` comes last, also at the end of a `with` block")
        # Around all workers of this process at once: they share its generators.
        with preserved(self._actors[0].courier.device):
            return [call(self._actors[0])] if self._threads is None else self._threads.each(call)


def _by_layer(name: str) -> tuple[int, str]:
    layer, _, rest = name.partition(".")
    return int(layer), rest
