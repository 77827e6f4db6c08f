"""The exchange of gradients between those who hold the same parameters: a handler a kind."""

from __future__ import annotations

from collections.abc import Sequence

from ..dependency import A, G, P, S, reduction_tree
from .compute.pieces import Pieces
from .handlers import carries_out
from .step import ActionContext, Task
from .transport.payload import Payload


def _pieces(ctx: ActionContext) -> tuple[Pieces, int]:
    """Return the pieces of the shard, with the gradients of the action's update, and the number of its piece."""
    (_, _, index), shard, routes = ctx.task.entry.action, ctx.task.shard, ctx.step.batch.spec.num_routes
    assert shard.updating.pieces is not None
    shard.turn_to(ctx.step.first_update + index % routes)
    return shard.updating.pieces, index // routes


@carries_out(G)
def _give(ctx: ActionContext) -> Payload | None:
    pieces, number = _pieces(ctx)
    return None if pieces.was_done(number) else pieces.give(number)


def exchanging(backward: Task, tasks: Sequence[Task]) -> Task:
    """Return the last backward of a shard, which gives and sums pieces of gradients (`G`, `S`) while it runs.

    A piece is summed if the gradients of the others have come. A GPU has the backward in its queue long before.
    """

    def handler(ctx: ActionContext) -> Payload | None:
        worker, step, pieces = ctx.worker, ctx.step, ctx.task.shard.updating.pieces
        assert pieces is not None
        of_piece = {task.entry.action.index // step.batch.spec.num_routes: task for task in tasks}

        def exchanged(number: int) -> bool:
            task = of_piece[number]
            if task.entry.action.kind is G:
                payload: Payload | None = pieces.give(number)
            else:
                if not worker.backend.in_step:
                    return False
                step.take_in()
                if not step.payloads.keys() >= set(task.entry.sources):
                    return False
                payload = _sum(ActionContext(worker, step, task))
            if payload is not None:
                if task.entry.here:
                    step.payloads[task.entry.action] = payload
                worker.mailbox.publish(step.run, task.name, payload, task.entry.consumers, to_compute=True)
            return True

        with pieces.exchanged_within(of_piece, exchanged):
            return backward.handler(ctx)

    return backward._replace(handler=handler)


@carries_out(S)
def _sum(ctx: ActionContext) -> Payload | None:
    """Add up in the order of stages and routes."""
    (pieces, number), (stage, _, index), spec = _pieces(ctx), ctx.task.entry.action, ctx.step.batch.spec
    if pieces.was_done(number):
        return None
    (piece,) = (p for p in reduction_tree(spec).pieces(stage, ctx.step.batch.reductions) if p.number == number)
    parts = [ctx.worker.backend.ready(ctx.step.payloads.pop(source)) for source in ctx.task.entry.sources]
    return pieces.sum(number, parts, piece.holders(spec.num_routes).index((stage, index % spec.num_routes)))


@carries_out(P)
def _give_parameters(ctx: ActionContext) -> Payload:
    pieces, number = _pieces(ctx)
    return pieces.updated(number)


@carries_out(A)
def _take_parameters(ctx: ActionContext) -> None:
    pieces, _ = _pieces(ctx)
    for source in ctx.task.entry.sources:
        if source.kind is P:  # not taken out: another stage here may hold them too
            pieces.adopt(ctx.worker.backend.ready(ctx.step.payloads[source]))
    ctx.task.shard.updating.adopted()
