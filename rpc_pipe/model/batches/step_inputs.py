"""The inputs of a worker's steps, each with the worker's compiled part of the schedule and the end of the step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock

from ...dependency import (  # isort: skip
    NO_REDUCTIONS, Order, Part, Reductions, Spec, check, entries, known_reductions,
)  # fmt: skip
from ...workers.actor import MOST_PARTS, WorkerActor
from ...workers.compute.modules.module_state import LOOKS
from ...workers.compute.result import Result, clips
from ...workers.compute.updating import Training
from ...workers.step import StepData, StepInput
from ...workers.transport.call import BUFFER, WRITTEN, Call
from .microbatches import Microbatches, update_shares


class StepEnd:
    """Decides step by step the facts of other stages that updates wait for; all workers decide the same.

    Args:
        training: its `post_validation` decides whether updates may precede the norm of all gradients (and be undone);
            None: the schedule's choice.
        commits: whether no worker updates before all hold the needs of their updates, so that a step can be undone.
    """

    def __init__(self, spec: Spec, training: Training, commits: bool = False) -> None:
        max_grad_norm, post_validation = training.max_grad_norm, training.post_validation
        scaled = training.grad_scaler is not None and training.grad_scaler.is_enabled()
        self._max_norm, self._accumulate = max_grad_norm, training.accumulate
        self._rule, self._deciding = training.skip_update, Lock()
        #: (number of a training step, norm) -> whether its update is left out: workers that are threads ask for one
        self._skipped: dict[tuple[int, str], bool] = {}
        self.skips = None if training.skip_update is None else self._skips
        possible = spec.synchronous and training.measures_norm and not scaled and not spec.parallelism.zero
        asked = spec.post_validation if post_validation is None else post_validation
        self._validates = possible and not commits and asked
        #: how parameters that several hold are divided into pieces; known when the model has been cut
        self.divided = NO_REDUCTIONS
        #: whether members of a worker meet in the first update, which then waits for the loss
        self.meets = False
        # Only the first step shows whether the loss is a sum with a weight, which updates wait for; and clipping is
        # frequent at first.
        norms = training.measures_norm or scaled or commits
        self._reductions = Reductions(weight=True, norms=norms, commits=commits)

    def updates(self, step: int) -> bool:
        """Return whether training step `step` ends with an update."""
        return (step + 1) % self._accumulate == 0

    def reductions(self, spec: Spec, step: int, *, streamed: bool) -> Reductions:
        """Return the reductions that the updates of training step `step` wait for.

        Args:
            streamed: whether the next step may begin before this one has ended; if not, an early update saves nothing.
        """
        if not self.updates(step):
            reductions = self._reductions._replace(norms=self._reductions.commits, validated=False, updates=False)
        else:
            reductions = self._reductions._replace(validated=self._reductions.validated and streamed)
        tied, buckets = self.divided.tied, self.divided.buckets
        return known_reductions(spec, reductions._replace(tied=tied, buckets=buckets))

    def _skips(self, number: int, norm: float) -> bool:
        """Return whether the user's rule leaves out the update of a training step; it is asked once."""
        assert self._rule is not None
        with self._deciding:
            key = number, norm.hex()  # a NaN equals none
            if key not in self._skipped:
                self._skipped = dict([*self._skipped.items()][-1:]) | {key: bool(self._rule(norm))}
            return self._skipped[key]

    def observe_result(self, result: Result) -> None:
        """Record the result of a step: after a clipped step the next is likely to be clipped too."""
        quiet = (
            self._validates
            and not self.meets
            and result.norm_tensor is not None
            and not result.skipped
            and not clips(self._max_norm, result.norm_tensor)
        )
        self._reductions = self._reductions._replace(weight=result.summed or self.meets, validated=quiet)


class StepInputs:
    """Makes the inputs of steps; parts are cached by number of microbatches and by the reductions of updates.

    Args:
        workers: of this process; `spec` has been checked for them.
        due: returns whether a checkpoint is written after a number of steps.

    Attributes:
        described: the settings that must be equal on all workers, in one line.
        weights: digests of the initial weights of replicas, which must be equal too.
    """

    def __init__(
        self, spec: Spec, order: Order, workers: Sequence[int], step_end: StepEnd, due: Callable[[int], bool]
    ) -> None:
        self._spec, self._order, self._workers = spec, order, workers
        self._step_end, self._due = step_end, due
        self.described = self.weights = ""
        #: by number of microbatches, for training and for whole sequences
        self._specs: dict[tuple[int, bool], Spec] = {(spec.num_microbatches, True): spec}
        self._parts: dict[tuple[Spec, int, bool, Reductions], Part] = {}

    def part(self, actor: WorkerActor, num_microbatches: int, reductions: Reductions, *, train: bool) -> Part:
        """Return the part that a worker runs in a step or, without `train`, in an evaluation.

        Raises:
            ScheduleError: the schedule cannot run this number of microbatches.
        """
        kind = num_microbatches, train
        if kind not in self._specs:
            if len(self._specs) >= MOST_PARTS:
                self._specs.clear()
                self._parts.clear()
            spec = self._spec if train else self._spec.unsliced()
            spec = replace(spec, num_microbatches=num_microbatches)
            for each in self._workers:
                check(spec, each)
            self._specs[kind] = spec
        key = self._specs[kind], actor.worker, train, reductions
        if key not in self._parts:
            chained = actor.chained()
            program = entries(key[0], key[1], forward_only=not train, reductions=reductions, chained=chained)
            self._parts[key] = Part(key[0], key[1], program)
        return self._parts[key]

    def make(
        self, actor: WorkerActor, batch: Microbatches, *, train: bool, what: str = "", streamed: bool = False
    ) -> StepInput:
        """Return the input of a worker's next step.

        Args:
            what: name of the call, if it is no training step.
            streamed: whether the next step may begin before this one has ended.
        """
        number = actor.next_step
        reductions = self._step_end.reductions(self._spec, number, streamed=streamed) if train else NO_REDUCTIONS
        part = self.part(actor, len(batch.inputs), reductions, train=train)
        weights = self.weights if number == 0 else ""
        if number and (number <= LOOKS or not train) and self._spec.num_routes > 1:
            weights = _written(actor, now=not train)
        order = " ".join(map(str, batch.order))
        call = Call(actor.worker, what or f"step {number + 1}", self.described, *batch.described, weights, order=order)
        scales = update_shares(part.spec, batch.shares) if train else None
        data: StepData = replace(batch, scales=scales)
        data = replace(data, targets=None) if what == "predict" else data
        return StepInput(
            part, self._order, call, data,
            train=train, reductions=reductions, updates=self._step_end.updates(number), last=self._due(number + 1),
            skips=self._step_end.skips,
        )  # fmt: skip


def _written(actor: WorkerActor, now: bool) -> str:
    """Return digests of the weights that forwards of each stage write, as those of the first step left them, or now.

    Those of buffers, which may differ, are as the first step left them.
    """
    states = [(stage, shard.state) for (stage, _), shard in actor.shards.items()]
    digests = ((stage, state.written() if now else state.first_written) for stage, state in states)
    weights = [f"{stage}{WRITTEN}={found}" for stage, found in digests if found]
    buffers = (
        f"{s}{BUFFER}{name}={found}" for s, state in states for name, found in (state.first_buffers or {}).items()
    )
    return " ".join((*weights, *(each for each in buffers if each.split() == [each] and each.count("=") == 1)))
