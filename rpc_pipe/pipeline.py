"""The public class: a model that is trained by a pipeline of workers.

The same program runs alone, with all workers as threads of one process, or as one of the worker processes that
`rpc-pipe run` or torchrun has started. All workers make the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, TypeVar

import torch

from .arguments import (
    begin_training,
    describe,
    refuse_options,
    refuse_shared,
    refuse_training,
    refuse_untrainable,
    settle_training,
    shown_plainly,
)
from .checkpoints.nouns import Checkpoints
from .checkpoints.weights import Weights
from .dependency import ConfigError, Entry, Order, PipeError, check, most_open
from .launching import launcher_link as link
from .launching import overrides
from .launching.job import own_part
from .model.batches.batch_reader import BatchReader
from .model.batches.lazy_batch import label_of
from .model.batches.loaders import is_loader, mean_over
from .model.batches.microbatches import Microbatches, Outputs, Pair, Prefetcher
from .model.batches.step_inputs import StepEnd, StepInputs
from .model.shard_maker import Model, ShardMaker, make_partition, with_metric
from .own_workers import make_actors
from .planning.apply_plan import PlanLike, apply_plan, warn_if_other_model
from .planning.specs import ScheduleLike, make_spec, with_replicas
from .step_report import Inspected, StepReports
from .workers.actor import WorkerActor
from .workers.compute.randomness import preserved
from .workers.compute.result import Result
from .workers.compute.shard import LossFn
from .workers.compute.updating import Training as Training
from .workers.threads import WorkerThreads
from .workers.transport.payload import Tree

T = TypeVar("T")


class Pipeline(Inspected):
    """A model cut into stages on several workers, trained by a schedule.

    Args:
        model: any module, or a function without arguments that makes one; it is cut where its forward calls its blocks
            (docs/models.md). Or an `nn.Sequential`, a list of modules or of callables that build them, or a picklable
            builder (see `partition.Builder`). With callables, weights depend on the seed, not on workers or cut.
        loss_fn: (output, target) -> mean over the microbatch, weighted by its rows, or (sum, weight): a step's loss is
            the sum of the sums divided by the sum of the weights. None: the model itself returns its loss.
        training: what trains it: optimizer, learning rates, clipping, and more (see `Training`). Left out, gradients
            are computed and nothing is trained, as the first step says.
        schedule, schedule_options: a name (`rpc-pipe schedules`), `file.py:Class` or a Spec class; its parameters.
        num_microbatches: number of parts of a batch, at most its rows. Required unless there is a plan.
        plan: what `rpc-pipe plan` wrote (a file, its contents or a `Plan`), instead of schedule, microbatches and cut.
        num_workers: 1 by default; in a job the number of its processes. Without a job more are threads that take turns,
            for looking and debugging: a step takes the sum of all work. `rpc-pipe run` gives each a process.
        replicas: how many replicas of the pipeline share the workers and each batch; see docs/replicas.md.
        slices: into how many each sequence is cut, or their sizes, such as "8,6,5,4"; see docs/schedules.md.
        zero: 1: each replica keeps the optimizer states of its part of the parameters alone (ZeRO stage 1).
        bucket: the most gradients, in MiB, that replicas exchange at once.
        spread: "stages" puts the replicas of a stage far apart instead of the stages of a pipeline (docs/replicas.md).
        split: number of layers, or of calls of blocks, for each stage; even by default.
        blocks: names of the model's lists of blocks, or of single blocks; found automatically by default.
        example: a batch with which the model is cut at once; by default the first batch cuts it.
        order: `ready` or `fixed`; by default what the schedule prefers. The result is the same.
        device: `cpu`, `cuda:N`, or `cuda`: each worker of a host uses another GPU. None: `cuda` where the host has a
            GPU for each of its workers, else `cpu`.
        seed: for everything random: dropout, and initial weights of layers given as callables or of a model made by a
            function, which are other numbers than those that the function would draw by itself.
        transport: between the processes of a job: `rpc` (default) or `zmq`; `local`: all workers in one process.
        stall_s: fail if a worker waits and nothing arrives for this many seconds.
        old: what is in `training` now, by the same names, as scripts for the version before give it.

    Attributes:
        worker: the number of this process; 0 if all workers are in this process.
        checkpoints: writes them and goes on from them.
        weights: the whole model's, to be read, written, loaded and averaged.

    Raises:
        ConfigError: an option cannot work.
        ScheduleError: the schedule cannot run; the message has a drawing.
    """

    @shown_plainly
    def __init__(
        self,
        model: Model,
        loss_fn: LossFn | None = None,
        *,
        num_microbatches: int = 0,
        plan: PlanLike | None = None,
        training: Training | None = None,
        schedule: ScheduleLike = "1f1b",
        schedule_options: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        replicas: int = 1,
        slices: int | str | None = None,
        zero: int = 0,
        bucket: float = 25.0,
        spread: str = "pipelines",
        split: Sequence[int] | None = None,
        blocks: str | Sequence[str] | None = None,
        example: Tree | None = None,
        order: Order | None = None,
        device: str | None = None,
        seed: int = 0,
        transport: str | None = None,
        stall_s: float = 300.0,
        **old: Any,
    ) -> None:
        self._forgot_optimizer = training is None and "optimizer" not in old
        schedule_options = with_replicas(schedule_options, replicas, zero, bucket, slices, spread)
        said = schedule, schedule_options, num_microbatches, num_workers, split, order, device, seed, transport, plan
        schedule, schedule_options, num_microbatches, num_workers, split, order, device, seed, transport, self._plan = (
            overrides.settle(apply_plan(plan, overrides.Settings(*said)))
        )
        job, self.num_workers = own_part(transport, num_workers)
        training = settle_training(type(self), training, old, alone=job is None)
        refuse_options(order, stall_s, self.num_workers, num_microbatches, seed)
        refuse_training(loss_fn, training)
        self.spec = make_spec(schedule, self.num_workers, num_microbatches, schedule_options)
        refuse_untrainable(self.spec, training)
        workers = [job.worker] if job else list(range(self.num_workers))
        for worker in workers:
            check(self.spec, worker)
        self.partition = make_partition(model, loss_fn, self.spec.num_stages, split, training, blocks=blocks, seed=seed)
        self.order: Order = order or self.spec.order
        self._step_end = StepEnd(self.spec, training)
        self._actors = make_actors(job, workers, device, training.max_grad_norm, stall_s)
        self._batch_reader = BatchReader(self.spec, self._actors, self.partition.whole, self.partition.loss_is_inside)
        self._threads = None if job else WorkerThreads(self._actors)
        self.worker, self._reports = 0 if job is None else job.rank, StepReports(self)
        elastic, num_routes = self.spec.elasticity > 0, self.spec.num_routes
        self.checkpoints = Checkpoints(self._each, self.num_workers, {"seed": seed}, stall_s, elastic, num_routes)
        self.weights = Weights(self._each, self.checkpoints, self.partition, self.gather)
        self._inputs = StepInputs(self.spec, self.order, workers, self._step_end, self.checkpoints.due)
        self._devices, self._stopped, self._closed = {actor.backend.device for actor in self._actors}, False, False
        #: None when the shards are made
        self._maker: ShardMaker | None = ShardMaker(self.partition, seed, training)
        link.attach(self)  # a model may hang while it is cut
        if self.partition.ranges:
            self._make(self._maker)
        elif example is not None:
            self._cut(example)

    def _make(self, maker: ShardMaker) -> None:
        """Make the shards of this process's workers, when the model has been cut."""
        refuse_shared(self.spec, self.partition.shared)
        here = [actor.worker for actor in self._actors]
        for actor in self._actors:
            actor.shards.update(maker.hosted(self.spec, actor.worker, actor.backend.device, here))
        # What must be equal on all workers, and is compared: the pipeline, and the replicas' initial weights.
        described = describe(self.spec, self.partition.ranges, maker.seed)
        self.checkpoints.about["pipeline"] = self._inputs.described = described
        self._inputs.weights = maker.weights
        self.checkpoints.config, self._step_end.divided = self.partition.config, maker.divided
        warn_if_other_model(self._plan, self.partition.name, [actor.shards for actor in self._actors])
        maker.end([shard for actor in self._actors for shard in actor.shards.values()])
        self._maker = None
        link.attach(self)
        overrides.made(self)

    # --- called by all workers

    @shown_plainly
    def step(self, batch: Tree | None = None, *, microbatches: Sequence[Tree] | None = None) -> float:
        """Train on one batch and return its loss, on every worker.

        Args:
            batch: (inputs, targets), trees of tensors that share dimension 0, which is split into microbatches that
                differ by at most one row; for a whole model, what it is called with (docs/models.md).
            microbatches: instead of a batch, a list of batches that are split already; shapes may differ.

        Raises:
            KeyboardInterrupt: the user asked to stop (Ctrl-C), and `stopped` has been True since the previous step.
            Disagreement: the workers were given different batches, or make different calls.
            WorkerFailure: a worker, which the message names, raised an exception. If all workers are in this process,
                the step is undone, and the pipeline can still be used.
        """
        if self._stopped:
            raise KeyboardInterrupt("the step before was the last, as `pipe.stopped` says: end the loop on it")
        self._forgot_optimizer = begin_training("step", self._forgot_optimizer and self.worker == 0)
        self.checkpoints.refuse_averaged("step")
        cut = self._cut(batch, microbatches)
        if self.replaying:
            loss, self._stopped = self.checkpoints.skip_step(label_of(batch), self._actors)
            return loss
        return self._record(self._run(cut, train=True), label_of(batch))

    @shown_plainly
    def train(self, batches: Iterable[Tree]) -> Iterator[float]:
        """Train on one batch after the other and yield the loss of each, on every worker.

        The next step begins while the previous one drains, so the pipeline stays full. When a loss is yielded, every
        worker has the weights after that step's update, so the body of the loop may evaluate and save. When the loop
        is left, the part of the next step that has run already is undone.

        Args:
            batches: each as for `step`; one is read ahead, or as many as steps overlap if the schedule is asynchronous.
        """
        batches = iter(batches)
        if self._maker is not None:  # the model is cut with the first batch, and resumed then
            first = next(batches, None)
            if first is None:
                return
            self._cut(first)
            batches = chain([first], batches)
        while self.replaying and (skipped := next(batches, batches)) is not batches:
            loss, self._stopped = self.checkpoints.skip_step(label_of(skipped), self._actors)
            yield loss
        ahead = Prefetcher(batches, self._cut, most_open(self.spec) - 1)
        made = partial(self._inputs.make, train=True, streamed=True)
        streams = {actor: actor.stream(map(partial(made, actor), ahead)) for actor in self._actors}
        try:
            for step in count():
                self._forgot_optimizer = begin_training("train", self._forgot_optimizer and self.worker == 0)
                ahead.advance(step)
                result = None if self._stopped else self._each(lambda actor: next(streams[actor], None))[0]
                if result is None:
                    return
                yield self._record(result, ahead.finished(step))
        finally:
            if not self._closed and not (self._threads is not None and self._threads.stuck):  # that has been raised
                self._each(lambda actor: streams[actor].close())

    def flush(self) -> None:
        """Complete the steps that `train` has begun by an asynchronous schedule; their losses are yielded next."""
        self._each(WorkerActor.flush)

    @shown_plainly
    def evaluate(
        self, batch: Tree | None = None, *, microbatches: Sequence[Tree] | None = None, metric: LossFn | None = None
    ) -> float:
        """Return the loss of a batch, or its `metric`, on every worker, without training on it; nan if `replaying`.

        Args:
            batch: as for `step`; or a loader of batches, whose mean goes by rows, or by the weights of (sum, weight).
            metric: like a loss_fn, (output, targets or batch) -> mean, or (sum, weight). No output leaves its worker.
        """
        if microbatches is None and is_loader(batch):
            return mean_over(self._evaluated(each, None, metric) for each in batch)
        return self._evaluated(batch, microbatches, metric)[0]

    def _evaluated(
        self, batch: Tree | None, microbatches: Sequence[Tree] | None, metric: LossFn | None
    ) -> tuple[float, float]:
        """Return the loss of a batch, or its metric, and the weight that it has among others."""
        cut = self._cut(batch, microbatches, None if metric is None else self.partition.pair_for_metric, whole=True)
        if self.replaying:
            return math.nan, 1.0
        with with_metric((shard for actor in self._actors for shard in actor.shards.values()), metric):
            result = self._run(cut, what="evaluate")
        assert result.loss is not None
        return result.loss, result.divisor if result.summed else cut.rows

    @shown_plainly
    def predict(self, inputs: Tree, *, to: int | Collection[int] | None = None) -> Tree:
        """Return the model's output for `inputs`, microbatches joined along dimension 0; None if `replaying`.

        Args:
            to: the worker or workers that get the output; others get None. None: all workers.
        """
        outputs, cut = Outputs(self.spec, to), self._cut(inputs, pair=self.partition.only_inputs, whole=True)
        if self.replaying:
            return None

        def predicted(actor: WorkerActor) -> list[Tree] | None:
            own = actor.run(self._inputs.make(actor, cut, train=False, what="predict")).outputs
            return actor.hand(outputs.name, own, outputs.senders, outputs.takers)

        found = outputs.joined(self._each(predicted))
        cut.finished()
        return self.partition.output(found)

    def gather(self, name: str, value: Callable[[WorkerActor], Tree]) -> list[Tree] | None:
        """Return `value(actor)` of all workers, in order, on worker 0; None on the others."""
        return self._each(lambda actor: actor.gather(name, value(actor)))[0]

    def barrier(self) -> None:
        """Return when every worker has called this."""
        self._each(WorkerActor.barrier)

    def close(self) -> None:
        """End the threads and release the model. A process of a job stays connected until it ends."""
        if not self._closed:
            self.checkpoints.settle()
        if self._threads is not None:
            self._threads.close()
        for actor in self._actors:
            actor.backend.close()
        self._threads, self._actors, self._closed = None, [], True

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- local to a process

    @property
    def stopped(self) -> bool:
        """True once the user has asked to stop (Ctrl-C): end the loop. All workers see it after the same step."""
        return self._stopped

    @property
    def steps_done(self) -> int:
        """How many training steps the weights have had; in a script that is resumed, how many it has called."""
        return self.checkpoints.results.steps_done(self._actors[0].step)

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; None without `max_grad_norm` or without an update."""
        return None if self.replaying else self.checkpoints.results.norm

    @property
    def last_batch(self) -> str:
        """What the batch of the last training step is called, also of a run before; nothing, if it has no name."""
        return self.checkpoints.results.batch

    @property
    def actors(self) -> list[WorkerActor]:
        """The workers of this process."""
        return self._actors

    def program(self, worker: int, num_microbatches: int) -> list[Entry]:
        """Return the entries of `worker` in a training step of `num_microbatches` microbatches."""
        actor = next(actor for actor in self._actors if actor.worker == worker)
        reductions = self._step_end.reductions(actor.next_step, streamed=False)
        return self._inputs.part(actor, num_microbatches, reductions, train=True).entries

    def shards(self, worker: int) -> list[tuple[int, int, int]]:
        """Return (stage, route, number of layers) of every shard that `worker` holds."""
        return [(stage, route, len(self.partition.ranges[stage])) for stage, route in self.spec.hosted(worker)]

    def request_stop(self) -> None:
        """Ask all workers to stop after the step that runs now. May be called from any thread."""
        for actor in self._actors:
            actor.stop_requested = True

    # --- inside

    def _cut(
        self,
        batch: Tree | None,
        microbatches: Sequence[Tree] | None = None,
        pair: Pair | None = None,
        whole: bool = False,
    ) -> Microbatches:
        how, cuts = pair or self.partition.pair, self._maker is not None
        found = self._batch_reader.cut(batch, microbatches, how, whole=whole, cuts_model=cuts)
        if self._maker is not None:
            with torch.inference_mode(False):  # what is made now is trained later
                self.partition.observe(found.inputs[0], trained=pair is None)
                self._make(self._maker)
        return found

    def _run(self, batch: Microbatches, *, train: bool = False, what: str = "") -> Result:
        result = self._each(lambda actor: actor.run(self._inputs.make(actor, batch, train=train, what=what)))[0]
        batch.finished()
        return result

    def _record(self, result: Result, batch: str) -> float:
        """Record the result of a training step; return its loss."""
        assert result.loss is not None
        self._stopped |= result.stop
        self._step_end.observe_result(result)
        self.checkpoints.note_step(result.loss, batch, result.norm)
        self.checkpoints.after(self.steps_done, result.stop)
        self._reports.tell(result.loss)
        return result.loss

    def _each(self, call: Callable[[WorkerActor], T]) -> list[T]:
        """Call for every worker of this process and raise the first cause."""
        if self._closed:
            raise PipeError("this pipeline is closed; `close` comes last, also at the end of a `with` block")
        if self._maker is not None and call is not WorkerActor.barrier:
            raise ConfigError("the model is cut by the first batch: to call this before, pass example= to Pipeline")
        # Around all workers of this process at once: they share its generators, and the modules given.
        with self.partition.module_copies.around(), preserved(*self._devices):
            return [call(self._actors[0])] if self._threads is None else self._threads.each(call)
