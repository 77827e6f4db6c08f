"""The inputs of a worker's steps, each with the worker's compiled part of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...dependency import NO_REDUCTIONS, Order, Part, Reductions, Spec, check, entries
from ...workers.actor import WorkerActor
from ...workers.handlers import StepInput
from ...workers.transport.call import Call
from .microbatches import Microbatches, update_shares
from .step_end import StepEnd


class StepInputs:
    """Makes the inputs of steps; parts are cached by number of microbatches and by what updates depend on.

    Args:
        workers: those of this process; `spec` has been checked for them.
        due: tells whether a checkpoint is written after so many steps.

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
        #: by number of microbatches, of those that are trained on and of whole sequences
        self._specs = {(spec.num_microbatches, True): spec}
        self._parts: dict[tuple[Spec, int, bool, Reductions], Part] = {}

    def part(self, actor: WorkerActor, num_microbatches: int, reductions: Reductions, *, train: bool) -> Part:
        """Return what a worker runs in a step or, without `train`, in an evaluation.

        Raises:
            ScheduleError: the schedule cannot run this number of microbatches.
        """
        kind = num_microbatches, train
        if kind not in self._specs:
            spec = self._spec if train else self._spec.unsliced()
            spec = replace(spec, num_microbatches=num_microbatches)
            for each in self._workers:
                check(spec, each)
            self._specs[kind] = spec
        key = self._specs[kind], actor.worker, train, reductions
        if key not in self._parts:
            chained = actor.chained()
            program = entries(key[0], key[1], forward_only=not train, reductions=reductions, chained=chained)
            self._parts[key] = Part(key[0], key[1], program, chained)
        return self._parts[key]

    def make(
        self, actor: WorkerActor, batch: Microbatches, *, train: bool, what: str = "", streamed: bool = False
    ) -> StepInput:
        """Return the input of a worker's next step.

        Args:
            what: the call, if it is no training step.
            streamed: whether the next step may begin before this one has ended.
        """
        number = actor.next_step
        reductions = self._step_end.reductions(number, streamed=streamed) if train else NO_REDUCTIONS
        part = self.part(actor, len(batch.inputs), reductions, train=train)
        weights = self.weights if number == 0 else ""
        call = Call(actor.worker, what or f"step {number}", self.described, *batch.described, weights)
        scales = update_shares(part.spec, batch.shares) if train and not part.spec.synchronous else None
        return StepInput(
            part, self._order, call, batch.inputs, None if what == "predict" else batch.targets, batch.shares,
            train=train, reductions=reductions, rows=batch.rows, tokens=batch.tokens, waited=batch.waited,
            scales=scales, scatter=batch.scatter, updates=self._step_end.updates(number), last=self._due(number + 1),
        )  # fmt: skip
