"""Gradients of steps since the last update; workers compute all of them again if a replica dies with its gradients."""

from __future__ import annotations

from collections.abc import Callable

from ...dependency import PipeError, StageLost
from ...workers.actor import WorkerActor
from ...workers.step import StepInput
from .microbatches import Microbatches


class Accumulated:
    """The batches of the steps since the last update.

    Args:
        updates: returns whether a step, counted from 0, ends with an update.
    """

    def __init__(self, updates: Callable[[int], bool]) -> None:
        self._updates = updates
        self._batches: dict[int, Microbatches] = {}

    def first(self, step: int) -> int:
        """Return the first step since the last update, when `step` steps are complete."""
        while step and not self._updates(step - 1):
            step -= 1
        return step

    def begin(self, step: int, batch: Microbatches) -> None:
        """Keep the batch of a step that begins."""
        first = self.first(step)
        self._batches = {number: kept for number, kept in self._batches.items() if number >= first} | {step: batch}

    def compute(self, actor: WorkerActor, make: Callable[[Microbatches], StepInput]) -> None:
        """Compute the gradients of complete steps since the last update once more; all workers do.

        Args:
            make: makes the input of the worker's next step.

        Raises:
            StageLost: a batch is not there any more.
        """
        step = actor.step
        first = self.first(step)
        for number in range(first, step):
            batch = self._batches.get(number)
            if batch is None or (batch.now is not None and batch.now() != batch.described):
                raise StageLost(f"step {number + 1}: its gradients have died, and its batch is gone; use a checkpoint")
        for shard in actor.shards.values() if first < step else ():
            shard.updating.held, shard.updating.weight = {}, 0.0
            shard.go_on_at(first, shard.updating.count)
            shard.abandon()
        actor.step = actor.next_step = first
        try:
            for number in range(first, step):
                actor.run(make(self._batches[number]))
        except PipeError:
            actor.abandon_broken()
            raise
        finally:
            actor.step = actor.next_step = step
