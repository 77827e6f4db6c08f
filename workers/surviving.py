"""Survivors of dead workers: they run actions of the dead replicas, and complete steps that stand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..dependency import Action, T, U, reduction_tree
from .compute.result import Result
from .compute.stash import Lodging
from .run import Stream
from .step import ActionContext, Step


@contextmanager
def in_place(lodging: Lodging, handed: Action | None, ctx: ActionContext) -> Iterator[None]:
    """Return a context with the gradients of the action's shard in place, as several shards have its weights.

    Args:
        handed: gives the gradients that the first backward of a part adds to.
    """
    shard = ctx.task.shard
    with lodging.turned(shard):  # with a backward that may have reached a milestone
        if handed is not None:
            assert shard.updating.pieces is not None
            shard.updating.pieces.take(ctx.worker.backend.ready(ctx.step.payloads.pop(handed)))
        yield


def completed(stream: Stream, known: tuple[Any, ...] | None) -> Result | None:
    """Complete the oldest training step from the payloads that this worker holds, and return its result.

    None: the step may not stand, as no worker is known to have made updates of it.

    Args:
        known: `Result.known` of another worker; None: as far as this worker knows.
    """
    step = next((step for step in stream._steps.values() if step.batch.train), None)
    if step is None or (known is None and not _stands(step)):
        return None
    if known is not None:
        parts, norm, finite = known
        step.tally.result = Result(parts, step.tally.outputs, step.batch.data.rows)
        step.tally.result.norm_tensor, step.tally.result.finite_tensor = norm, finite
    for action, task in step.tasks.items():
        if action.kind is U and not step.state.has_finished(action):
            ActionContext(stream._worker, step, task).run()
    return stream._close(step)


def _stands(step: Step) -> bool:
    """Return whether this worker knows that all workers hold the needs of their updates of a step that commits."""
    told = T(*reduction_tree(step.batch.spec).own[step.state.part.worker])
    return step.tally.result is not None and told in step.tasks and step.state.has_finished(told)
