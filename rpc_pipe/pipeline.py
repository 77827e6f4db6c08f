"""The public class: a model that is trained by a pipeline of workers.

The same program runs alone, with all workers as threads of one process, or as one of the worker processes that
`rpc-pipe run` or torchrun has started. All workers make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from .arguments import (  # isort: skip
    begin_training, compile_options, make_ordering, refuse_training, settle_training, shown_plainly,
)  # fmt: skip
from .dependency import Order, Spec
from .dependency.declared import Parallelism
from .dependency.pipeline_options import Options
from .inspected import Inspected
from .launching import attaching
from .launching import launcher_link as link
from .launching.job import own_part
from .model.batches.microbatches import SplitBatch as SplitBatch
from .model.batches.microbatches import label_of
from .model.batches.step_inputs import StepEnd
from .model.shard_maker import Model, make_partition
from .model.sharding import ShardFn, settle_sharing
from .own_workers import checked_workers, elasticity, make_actors, run_result
from .planning.specs import ScheduleLike, make_spec, refuse_job
from .session import Session
from .workers.actor import WorkerActor
from .workers.compute.result import Result
from .workers.compute.shard import LossFn
from .workers.compute.updating import Training as Training
from .workers.transport.payload import Tree

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from .checkpoints.facade import Checkpoints
    from .checkpoints.weights import Weights
    from .model.batches.ordering import MicrobatchCost
    from .model.observed_partition import ObservedPartition
    from .model.partition import LayerPartition
    from .planning.pipe_options import PlanLike


def _planned(options: Options) -> Options:
    from .planning.pipe_options import apply_plan

    return apply_plan(options)


class Pipeline(Inspected):
    """A model cut into stages on several workers, trained by a schedule.

    Args:
        model: any module, or a function without arguments that makes one; it is cut where its forward calls its blocks
            (docs/models.md). Or an `nn.Sequential`, a list of modules or of callables that build them, or a picklable
            builder (see `partition.Builder`). With callables, weights depend on the seed, not on workers or cut.
        loss_fn: (output, target) -> mean over the microbatch, weighted by its rows, or (sum, weight): a step's loss is
            the sum of the sums divided by the sum of the weights. None: the model itself returns its loss.
        training: optimizer, learning rates, clipping, and more (see `Training`). Left out, gradients are computed and
            nothing is trained, and the first step warns of it.
        schedule, schedule_options: a name (`rpc-pipe schedules`), `file.py:Class` or a Spec class; its parameters.
        num_microbatches: number of parts of a batch, at most its rows. Required unless there is a plan.
        plan: result of `rpc-pipe plan` (a file, its contents or a `Plan`), instead of schedule, microbatches and cut.
        num_workers: 1 by default; in a job the number of its processes. Without a job more are threads that take turns,
            for looking and debugging: a step takes the sum of all work. `rpc-pipe run` gives each a process.
        replicas: how many replicas of the pipeline share the workers and each batch; see docs/replicas.md.
        slices: number of slices of each sequence, or their sizes, such as "8,6,5,4"; see docs/schedules.md.
        zero: 1: each replica keeps the optimizer states of its part of the parameters alone (ZeRO stage 1).
        bucket: the most gradients, in MiB, that replicas exchange at once.
        spread: "stages" puts the replicas of a stage far apart instead of the stages of a pipeline (docs/replicas.md).
        members: how many processes are one worker together, and share its stages; see docs/members.md.
        shard: `fsdp`, `fsdp-kept`, `tp`, or a function of (layer or block, mesh of the members) that divides it.
        reduce: `step` or `microbatch`: when members sum gradients, with `fsdp`.
        mp_policy: torch's policy of the types in which `fsdp` computes, gathers and sums.
        compile: True: `torch.compile` compiles each layer or block alone; or its options, by name (docs/training.md).
        split: number of layers, or of calls of blocks, for each stage; even by default.
        blocks: names of the model's lists of blocks, or of single blocks; found automatically by default.
        example: a batch with which the model is cut at once; by default the first batch cuts it.
        order: `ready` or `fixed`; by default the schedule's preference. The result is the same.
        microbatch_order: `balanced`: unequal microbatches train in an order that fills and drains the pipeline quickly,
            by their predicted times; sums follow this order (docs/training.md). `given`: as they are.
        microbatch_cost: predicts times: called as the model is, with a microbatch, it returns seconds, or a sequence of
            seconds by stage, alike on all workers. Or the file of `rpc-pipe profile --lengths`. None: tokens, or
            elements of the first tensor, count.
        device: `cpu`, `cuda:N`, or `cuda`: each worker of a host uses another GPU. Other accelerators that torch knows
            by their names. None: the accelerator if the host has one for each of its workers, else `cpu`.
        seed: for everything random: dropout, and initial weights of layers given as callables or of a model made by a
            function, which differ from the numbers that the function would draw by itself.
        transport: between the processes of a job: `rpc` (default) or `zmq`; `local`: all workers in one process.
        stall_s: fail if a worker waits and nothing arrives for this many seconds.

    Raises:
        ConfigError: an option cannot work.
        ScheduleError: the schedule cannot run; the message has a drawing.
    """

    _checkpoints: Checkpoints | None = None

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
        replicas: int = Parallelism.replicas,
        slices: int | str | None = None,
        zero: int = Parallelism.zero,
        bucket: float = Parallelism.bucket,
        spread: str = Parallelism.spread,
        members: int = 1,
        shard: str | ShardFn | None = None,
        reduce: str = "step",
        mp_policy: MixedPrecisionPolicy | None = None,
        compile: bool | Mapping[str, Any] = False,
        split: Sequence[int] | None = None,
        blocks: str | Sequence[str] | None = None,
        example: Tree | None = None,
        order: Order | None = None,
        microbatch_order: str = "given",
        microbatch_cost: MicrobatchCost | None = None,
        device: str | None = None,
        seed: int = 0,
        transport: str | None = None,
        stall_s: float = 300.0,
    ) -> None:
        asked = Options.taken(locals())
        self._forgot_optimizer, training = training is None, settle_training(training)
        options = attaching.current.over(asked if plan is None else _planned(asked)).checked()
        sharing, self._plan = settle_sharing(options), options.plan
        job, self.num_workers = own_part(options.transport, options.num_workers, sharing.count)
        each = sharing.microbatches(options.num_microbatches)
        spec = make_spec(options.schedule, self.num_workers, each, options.schedule_options)
        refuse_training(loss_fn, training)
        refuse_job(spec, sharing, options.order, training, job, link.present())
        workers = checked_workers(spec, job)
        partition = make_partition(model, loss_fn, spec.num_stages, training, options)
        ordering = make_ordering(options, asked.microbatch_order, is_called=partition.whole is not None)
        end = StepEnd(spec, training, commits=(recover := elasticity(job)) is not None)
        actors = make_actors(job, workers, training.max_grad_norm, options)
        self._compile = compile_options(options.compile, sharing, on_host=actors[0].backend.in_step)
        self._session = Session(
            spec, sharing.order(options.order, spec.order), partition, end, actors,
            training=training, options=options, job=job, sharing=sharing, ordering=ordering, recover=recover,
        )  # fmt: skip
        self._session.made, self._stopped = self._made, False
        attaching.attach(self, run_result)  # a model may hang while it is cut
        self._session.cut_at_once(example)

    def _made(self) -> None:
        """Go on when the shards of this process's workers are made, or made anew in a later epoch."""
        for shard in self._session.shards if self._compile is not None else ():
            shard.slice.compile(self._compile or {})
        if self._plan is not None and not self._session.epoch:
            from .planning.pipe_options import warn_if_other_model
            from .planning.plan import read_plan

            plan = read_plan(self._plan)
            self.predicted_ms = plan.predicted_ms
            warn_if_other_model(plan, self._session.name, [actor.shards for actor in self.actors])
        if not self._session.epoch:
            attaching.attach(self, run_result)
            attaching.current.made(self)

    @property
    def worker(self) -> int:
        """The number of this process; 0 if all workers are in this process."""
        return self._session.process

    # --- called by all workers

    @shown_plainly
    def step(self, batch: Tree | None = None, *, microbatches: Sequence[Tree] | None = None) -> float:
        """Train on one batch and return its loss, on every worker.

        Args:
            batch: (inputs, targets), trees of tensors that share dimension 0, which is split into microbatches that
                differ by at most one row; for a whole model, its arguments (docs/models.md). A `SplitBatch` is split
                already.
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
        self._session.results.refuse_averaged("step")
        cut = self._session.cut(batch, microbatches)
        if self.replaying:
            loss, self._stopped = self.checkpoints.skip_step(label_of(batch), self.actors, cut.rows)
            cut.finished()  # the loader's position advances
            return loss
        return self._record(self._session.run(cut, train=True), label_of(batch))

    @shown_plainly
    def train(self, batches: Iterable[Tree]) -> Iterator[float]:
        """Train on one batch after the other and yield the loss of each, on every worker.

        The next step begins while the previous one drains, so the pipeline stays full. When a loss is yielded, every
        worker has the weights after that step's update, so the body of the loop may evaluate and save. When the loop
        is left, the part of the next step that has run already is undone.

        Args:
            batches: each as for `step`; one is read ahead, or as many as steps overlap if the schedule is asynchronous.
        """
        from .model.batches.loaders import refuse_batch

        refuse_batch(batches)
        batches = iter(batches)
        if self._session.awaits_batch:  # the model is cut with the first batch, and resumed then
            first = next(batches, None)
            if first is None:
                return
            self._session.cut(first)
            batches = chain([first], batches)
        while self.replaying and (skipped := next(batches, batches)) is not batches:
            loss, self._stopped = self.checkpoints.skip_step(label_of(skipped), self.actors)
            yield loss
        with closing(self._session.stream(batches)) as results:
            while True:
                self._forgot_optimizer = begin_training("train", self._forgot_optimizer and self.worker == 0)
                if self._stopped or (found := next(results, None)) is None:
                    return
                yield self._record(*found)

    def flush(self) -> None:
        """Complete the steps that `train` has begun by an asynchronous schedule; their losses are yielded next."""
        self._session.each(WorkerActor.flush)

    @shown_plainly
    def evaluate(
        self,
        batch: Tree | None = None,
        *,
        microbatches: Sequence[Tree] | None = None,
        metric: LossFn | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Any:
        """Return the loss of a batch, or its `metric`, on every worker, without training on it; nan if `replaying`.

        Args:
            batch: as for `step`; or a loader, or a list of batches. Their mean is weighted: by the weight of (sum,
                weight), by `num_items_in_batch` where the model's loss is divided by it, else by rows.
            metric: like a loss_fn, (output, targets or batch) -> mean, or (sum, weight), or a dict of these by name: a
                dict of numbers is returned. No output leaves its worker.
            progress: called after each batch with the number of batches that are done.
        """
        from .evaluating import evaluate  # a run that measures nothing does without

        value = evaluate(self._session, batch, microbatches, metric, progress)
        if metric is None and not self.replaying:
            for actor in self.actors:
                actor.listeners.tell("evaluated", self.steps_done, value)
        return value

    @shown_plainly
    def predict(self, inputs: Tree, *, to: int | Collection[int] | None = None) -> Tree:
        """Return the model's output for `inputs`, microbatches joined along dimension 0; None if `replaying`.

        Args:
            to: the worker or workers that get the output; the rest get None. None: all workers.
        """
        from .model.batches.loaders import refuse_batches
        from .model.batches.outputs import Outputs

        Outputs(self.spec, to)  # before the batch is read
        refuse_batches("predict", inputs, self.partition.could_be_input)
        cut = self._session.cut(inputs, pair=self.partition.only_inputs, whole=True)
        return None if self.replaying else self._session.predict(cut, to)

    @shown_plainly
    def generate(self, inputs: Tree, max_new_tokens: int | None = None, **options: Any) -> Tree:
        """Return prompts with new tokens on every worker, by a model of transformers; None if `replaying`.

        Args:
            inputs: tokens of shape (rows, length), or a dict of them and their mask; padded on the left.
            options: as of transformers' `generate`, and `seed=`, `on_tokens=` (docs/huggingface.md).
        """
        from .generation import generate

        stops = not self._stopped
        return None if self.replaying else generate(self._session, inputs, max_new_tokens, stops=stops, **options)

    def gather(self, name: str, value: Callable[[WorkerActor], Tree]) -> list[Tree] | None:
        """Return `value(actor)` of all workers, in order, on worker 0; None on the rest."""
        return self._session.gather(name, value)

    def barrier(self) -> None:
        """Return when every worker has called this."""
        self._session.each(WorkerActor.barrier)

    def close(self) -> None:
        """End the threads and release the model. A process of a job stays connected until it ends."""
        if self._session.closed or attaching.current.closing(self):
            return
        if self._checkpoints is not None:
            self._checkpoints.settle()
        self._session.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- local to a process

    @property
    def checkpoints(self) -> Checkpoints:
        """Writes checkpoints, and resumes from them."""
        if self._checkpoints is None:
            from .checkpoints.facade import Checkpoints  # a run that saves nothing does without

            self._checkpoints = Checkpoints(self._session)
        return self._checkpoints

    @cached_property
    def weights(self) -> Weights:
        """The whole model's weights, to be read, written, loaded and averaged."""
        from .checkpoints.weights import Weights  # a run that saves nothing does without

        return Weights(self._session, self.checkpoints)

    @property
    def stopped(self) -> bool:
        """True once the user has asked to stop (Ctrl-C): end the loop. All workers see it after the same step."""
        return self._stopped

    @property
    def steps_done(self) -> int:
        """How many training steps the weights have had; in a script that is resumed, how many it has called."""
        return self._session.results.steps_done(self.actors[0].step)

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last gradients before clipping; None without an update, or if it is not measured."""
        return None if self.replaying else self._session.results.norm

    @property
    def actors(self) -> list[WorkerActor]:
        """The workers of this process."""
        return self._session.actors

    @property
    def spec(self) -> Spec:
        """The schedule."""
        return self._session.spec

    @property
    def order(self) -> Order:
        """The order in which workers run ready actions."""
        return self._session.order

    @property
    def partition(self) -> LayerPartition | ObservedPartition:
        """The model, cut into stages."""
        return self._session.partition

    def request_stop(self) -> None:
        """Ask all workers to stop after the same step, soon after the one that runs now. For any thread."""
        for actor in self.actors:
            actor.stop_requested = True

    # --- inside

    def _record(self, result: Result, batch: str) -> float:
        """Record the result of a training step; return its loss."""
        assert result.loss is not None
        self._stopped |= result.stop
        self._session.end.observe_result(result)
        self._session.results.note_step(result.loss, batch, result.norm, result.rows)
        if self._checkpoints is not None:
            self._checkpoints.after(self.steps_done, result.stop)
        if self._reports is not None:
            self._reports.tell(result.loss)
        if result.rest and self._session.recovery is not None:
            self._session.recovery.rest()
        return result.loss
