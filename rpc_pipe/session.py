"""A run of one schedule: the steps, evaluations and predictions of this process's workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .arguments import describe, refuse_shared
from .checkpoints.resumption import Resumption
from .dependency import BatchError, ConfigError, Entry, Order, PipeError, Spec
from .dependency.pipeline_options import Options
from .model.batches.batch_reader import BatchReader
from .model.batches.microbatches import Microbatches, Pair, form_of, has_items, with_means
from .model.batches.step_inputs import StepEnd, StepInputs
from .model.shard_maker import ShardMaker
from .workers.actor import WorkerActor
from .workers.compute.modules.randomness import preserved
from .workers.compute.result import Result
from .workers.compute.sequences.slices import Divide, plain_name
from .workers.compute.shard import LossFn, Shard
from .workers.compute.updating import Training
from .workers.step import StepInput
from .workers.threads import WorkerThreads
from .workers.transport.payload import Tree

if TYPE_CHECKING:
    from .launching.job import Job
    from .model.batches.ordering import Ordering
    from .model.observed_partition import ObservedPartition
    from .model.partition import LayerPartition
    from .model.sharding import Sharing
    from .workers.compute.parts.members import Members

T = TypeVar("T")


class Session:
    """The workers of this process in a run of one schedule: its relation, their shards, the inputs of their steps.

    Args:
        spec: the schedule, which has been checked for these workers.
        partition: the model, cut into the schedule's stages, or to be cut by the first batch.
        end: decides how steps end.
        actors: the workers of this process.
        job: of this process; None: they are all workers of the pipeline.
        ordering: of the microbatches of training steps; None: the given order.
        sharing: how the members of this worker share its stages, if it has several.

    Attributes:
        due: function of the number of steps: whether a checkpoint is written after them.
        made: called when the shards are made.
        settle: called before workers join or leave: completes a checkpoint that is being written.
        results: of the last steps, and which calls of a resumed script are skipped.
        facts: that all workers have agreed on, as JSON, by name; newcomers get them.
        described: the settings that must be equal on all workers, in one line.
        name, config: of the model, for checkpoints; None before the shards are made.
    """

    def __init__(
        self,
        spec: Spec,
        order: Order,
        partition: LayerPartition | ObservedPartition,
        end: StepEnd,
        actors: Sequence[WorkerActor],
        *,
        training: Training,
        options: Options,
        job: Job | None = None,
        sharing: Sharing | None = None,
        ordering: Ordering | None = None,
        recover: Callable[[Session, ShardMaker], Any] | None = None,
    ) -> None:
        self.order, self.partition, self.end, self.actors = order, partition, end, list(actors)
        self.ordering = ordering
        self.due: Callable[[int], bool] = lambda step: False
        self.made: Callable[[], None] = lambda: None
        self.settle: Callable[[], object] = lambda: None
        self.facts: dict[str, Any] = {}
        self.results = Resumption()
        #: of the first batch with its targets; None: there was none
        self.form: Any = None
        self._recover = recover
        self.options, self.seed, self.stall_s = options, options.seed, options.stall_s
        self.described = self.name = ""
        self.config: Any = None
        self._threads = WorkerThreads(actors) if job is None else None
        self._devices = {actor.backend.device for actor in actors}
        self._members: Members | None = None
        divide: Divide | None = None
        if job is not None and sharing is not None and job.members > 1:
            from .own_members import make_members  # most workers are one process

            self._members, divide = make_members(job, sharing, actors[0].backend.device)
            self._members.slices = len(spec.parallelism.slices)
        end.meets = self._members is not None
        for actor in actors:
            actor.members = self._members
        self._reader = BatchReader(spec, self.actors, partition.whole, partition.loss_is_inside, ordering)
        self._reader.counts = recover is None
        self.closed = False
        #: the `Recovery` that lets the job continue without workers that die; None: it ends with them
        self.recovery: Any = None
        #: the number of workers' deaths so far
        self.epoch = 0
        #: the number of this process for the script: 0 on the lowest live one
        self.process = 0 if job is None else job.rank
        #: None when the shards are made
        keeps = job is not None and job.shapes is not None
        self._maker: ShardMaker | None = ShardMaker(partition, self.seed, training, self._members, divide, keeps)
        self.begin(spec)

    def begin(self, spec: Spec) -> None:
        """Run `spec` from now on. Only the session holds the schedule, and the values that follow from it."""
        self.spec = spec
        members, count = self._members, 1 if self._members is None else self._members.shares
        whole = replace(spec, num_microbatches=spec.num_microbatches * count) if count > 1 else spec
        self._reader.begin(whole, count, 0 if members is None else members.part)
        workers = [actor.worker for actor in self.actors]
        # A worker that has parts of several replicas does not wait with one for the other.
        order: Order = self.order if len(spec.workers) == spec.num_workers else "ready"
        self._inputs = StepInputs(spec, order, workers, self.end, lambda step: self.due(step))
        self._inputs.described = self.described

    # --- the shards

    @property
    def awaits_batch(self) -> bool:
        """Whether the first batch is still to cut the model."""
        return self._maker is not None

    @property
    def is_first(self) -> bool:
        """Whether this process is alone, or the first member of its worker, which writes the common state."""
        return self._members is None or self._members.index == 0

    @property
    def is_alone(self) -> bool:
        """Whether this process is all of its worker."""
        return self._members is None

    @property
    def shards(self) -> Iterator[Shard]:
        """The shards of this process."""
        return (shard for actor in self.actors for shard in actor.shards.values())

    def make_shards(self) -> None:
        """Make the shards of this process's workers, when the model has been cut."""
        with nullcontext() if self._members is None else self._members.as_world():
            self._make_shards()

    def _make_shards(self) -> None:
        maker, self._maker = self._maker, None
        assert maker is not None
        refuse_shared(self.spec, self.partition.shared)
        here = [actor.worker for actor in self.actors]
        for actor in self.actors:
            actor.shards.update(maker.hosted(self.spec, actor.worker, actor.backend.device, here))
        # The pipeline, and the replicas' initial weights, must be equal on all workers, and are compared.
        self.described = self._inputs.described = describe(self.spec, self.partition.ranges, maker.seed, self.options)
        self._inputs.weights, self.end.divided = maker.weights, maker.divided
        self.name, self.config = self.partition.name, self.partition.config
        if self._members is not None:
            self._members.look({shard.stage: shard.state_dict() for shard in self.shards})
        maker.end(list(self.shards), alone=self._members is None and len(here) == self.spec.num_workers)
        if self._recover is not None:
            self.recovery = self._recover(self, maker)
        self.made()
        if self.recovery is not None:
            self.recovery.begin()

    # --- steps

    def cut_at_once(self, example: Tree | None) -> None:
        """Make the shards if layers are cut, or an example cuts the model; else the first batch does."""
        if self.partition.ranges:
            self.make_shards()
        elif example is not None:
            self.cut(example, trained=False)  # it may have no labels, for a pipeline that predicts or generates

    def cut(
        self,
        batch: Tree | None,
        microbatches: Sequence[Tree] | None = None,
        pair: Pair | None = None,
        whole: bool = False,
        trained: bool = True,
    ) -> Microbatches:
        """Split a batch into microbatches; the first one cuts the model, too, if no example has."""
        how, cuts = pair or self.partition.pair, self.awaits_batch
        first = self.form is None and pair is None
        if first and not whole and microbatches is None:
            if not isinstance(next(iter(batch), None) if isinstance(batch, (tuple, list)) else batch, Tensor):
                from .model.batches.loaders import refuse_batches

                refuse_batches("step", batch, self.partition.could_be_one)
        found = self._reader.cut(batch, microbatches, how, whole=whole, cuts_model=cuts)
        if first and found.lazy is None:
            self.form = form_of(batch if microbatches is None else microbatches[0])
        if cuts:
            with torch.inference_mode(False):  # parameters that are made now are trained later
                self.partition.observe(found.inputs[0], trained=trained and pair is None)
                self.make_shards()
        if self.partition.adds_means and self.spec.takes_steps and any(map(has_items, found.first)):
            found = with_means(found)
        if self._recover is not None and found.lazy is not None:
            found = replace(found, now_read=self._again(found, partial(self.cut, batch, microbatches, pair, whole)))
        if whole or self._members is None:
            return found
        from .own_members import own_rows

        return own_rows(found, self._members)

    def _again(self, found: Microbatches, cut: Callable[[], Microbatches]) -> Callable[[], Microbatches]:
        """Return a call that returns a batch as this worker reads it now: once more, if workers have died since."""
        epoch = self.epoch
        return lambda: found if epoch == self.epoch else cut()

    def run(self, batch: Microbatches, *, train: bool = False, what: str = "") -> Result:
        """Run a step, or without `train` a call named `what`, and return its result."""
        with self._calling():
            if self.recovery is not None:
                if train:
                    self.recovery.accumulated.begin(self.actors[0].step, batch)
                make = partial(self.inputs_now, batch, train=train, what=what)
                result: Result = self.recovery.call(lambda actor: actor.run(make(actor)), trains=train)
            elif self._threads is None or self._threads.alone:  # in as few frames as possible
                result = self.actors[0].run(self._inputs.make(self.actors[0], batch, train=train, what=what))
            else:
                each = self._threads.each
                result = each(lambda actor: actor.run(self._inputs.make(actor, batch, train=train, what=what)))[0]
        batch.finished()
        return result

    def inputs_now(self, batch: Microbatches, actor: WorkerActor, *, train: bool, what: str = "") -> StepInput:
        """Return a worker's input for the shards and rows that it has now."""
        return self._inputs.make(actor, batch.read_now(), train=train, what=what)

    def evaluate(self, batch: Microbatches, metric: LossFn | None) -> Result:
        """Return the result of a batch, with `metric` in place of the loss."""
        from .held_out import with_metric  # a run that measures nothing does without

        self._adopt()
        with with_metric(lambda: self.shards, metric):
            return self.run(batch, what="evaluate")

    def _adopt(self) -> None:
        """Let members that train on other rows evaluate by the running statistics of the first, which is saved."""
        if self._members is not None and self._members.rows:
            states = ((shard.state_dict(), dict(shard.named_parameters())) for shard in self.shards)
            held = {n: t for state, trained in states for n, t in state.items() if plain_name(n) not in trained}
            self._members.adopt(held)

    def predict(self, batch: Microbatches, to: int | Collection[int] | None) -> Tree:
        """Return the model's output for a batch on the workers that get it.

        Raises:
            BatchError: its rows are grouped by length.
        """
        from .model.batches.outputs import Outputs

        self._adopt()
        if batch.sizes is not None:
            raise BatchError("inputs: rows of a loader with lengths= are in groups; pass batch[0]")

        def predicted(actor: WorkerActor) -> list[Tree] | None:
            own = actor.run(self.inputs_now(batch, actor, train=False, what="predict")).outputs
            outputs = Outputs(self.spec, to)  # of the workers that are left
            return actor.hand(outputs.name, own, outputs.senders, outputs.takers)

        found = Outputs.joined(self.each(predicted))
        batch.finished()
        return self.partition.output(found)

    def stream(self, batches: Iterator[Tree]) -> Generator[tuple[Result, str], None, None]:
        """Train on one batch after the other; yield the result of each, and the name of its batch."""
        from .dependency.earlier_steps import most_open
        from .model.batches.prefetcher import Prefetcher

        ahead = Prefetcher(batches, self.cut, most_open(self.spec) - 1)
        #: by worker, with the epoch of their beginning
        streams: dict[WorkerActor, tuple[int, Generator[Result, None, None]]] = {}
        step = 0

        def following(actor: WorkerActor) -> Result | None:
            epoch, stream = streams.get(actor, (-1, None))
            if stream is None or epoch != self.epoch:
                if stream is not None:
                    stream.close()
                made = partial(self._inputs.make, actor, train=True, streamed=True)
                streams[actor] = self.epoch, actor.stream(map(made, ahead.since(step)))
            return next(streams[actor][1], None)

        try:
            for step in count():
                ahead.advance(step)
                if self.recovery is not None and (batch := ahead.at(step)) is not None:
                    self.recovery.accumulated.begin(self.actors[0].step, batch)
                result = self.each(following, trains=True)[0]
                if result is None:
                    return
                yield result, ahead.finished(step)
        finally:
            if not self.closed and not (self._threads is not None and self._threads.stuck):  # that has been raised
                self.each(lambda actor: streams[actor][1].close() if actor in streams else None, alone=True)

    def program(self, worker: int, num_microbatches: int) -> list[Entry]:
        """Return the entries of `worker` in a training step of `num_microbatches` microbatches."""
        actor = next(actor for actor in self.actors if actor.worker == worker)
        reductions = self.end.reductions(self.spec, actor.next_step, streamed=False)
        return self._inputs.part(actor, num_microbatches, reductions, train=True).entries

    # --- the workers

    def each(self, call: Callable[[WorkerActor], T], *, trains: bool = False, alone: bool = False) -> list[T]:
        """Call for every worker of this process and raise the first cause.

        Args:
            trains: whether the call gives the result of a training step.
            alone: whether it asks no other worker, and workers may make it each at its time.
        """
        with self._calling(call is WorkerActor.barrier, alone):
            if self.recovery is not None and not alone:
                return [self.recovery.call(call, trains=trains)]
            return [call(self.actors[0])] if self._threads is None else self._threads.each(call)

    @contextmanager
    def _calling(self, uncut: bool = False, alone: bool = False) -> Iterator[None]:
        """Return a context for calls of the workers; the model must have been cut, unless `uncut`."""
        if self.closed:
            raise PipeError("pipeline: is closed; `close` comes last, also at the end of a `with` block")
        if self.awaits_batch and not uncut:
            raise ConfigError("example: the first batch cuts the model; to call this before, pass example= to Pipeline")
        divided = self.shards if self.spec.parallelism.zero or self.spec.averaging_pull else ()
        moves = [shard.outside_updates for shard in divided if shard.outside_updates is not None]
        for each in () if alone else moves:
            each.refuse()
        # Around all workers of this process at once: they share its generators, and the modules given.
        with ExitStack() as stack:
            for each in moves:
                stack.callback(each.note)
            stack.enter_context(self.partition.module_copies.around())
            stack.enter_context(preserved(*self._devices))
            if self._threads is not None:
                stack.enter_context(self._threads.undoing())
            if self._members is not None:
                stack.enter_context(self._members.as_world())
            yield

    def gather(self, name: str, value: Callable[[WorkerActor], Tree]) -> list[Tree] | None:
        """Return `value(actor)` of all workers, in order, on the first worker; None on the rest.

        Raises:
            ConfigError: `value` is no function.
        """
        if not callable(value):
            raise ConfigError(f"gather: value={value!r}: must be a function of a worker, as `lambda worker: {value!r}`")
        if self.recovery is not None and self.recovery.repeats:
            return None
        return self.each(lambda actor: actor.gather(name, value(actor)))[0]

    def close(self) -> None:
        """End the threads and release the model."""
        if self._threads is not None:
            self._threads.close()
        for actor in self.actors:
            actor.backend.close()
        self._threads, self.actors, self.closed = None, [], True
