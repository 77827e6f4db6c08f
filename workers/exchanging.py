"""The exchange of gradients between those who hold the same parameters: a handler a kind."""

from __future__ import annotations

from collections.abc import Sequence

from ..dependency import A, G, P, S, reduction_tree
from .compute.pieces import Pieces
from .handlers import ActionContext, Task, carries_out
from .transport.payload import Payload


def _pieces(ctx: ActionContext) -> tuple[Pieces, int]:
    """Return the pieces of the shard, and the number of that of the action."""
    pieces = ctx.task.shard.updating.pieces
    assert pieces is not None
    return pieces, ctx.task.entry.action.index // ctx.step.batch.spec.num_routes


@carries_out(G)
def _give(ctx: ActionContext) -> Payload | None:
    pieces, number = _pieces(ctx)
    return None if number in pieces.given else pieces.give(number)


def giving(backward: Task, given: Sequence[Task]) -> Task:
    """Return the last backward of a shard, which gives pieces of gradients (tasks of `G`) while it runs."""

    def handler(ctx: ActionContext) -> Payload | None:
        pieces, publish = ctx.task.shard.updating.pieces, ctx.worker.mailbox.publish
        assert pieces is not None
        tasks = {task.entry.action.index // ctx.step.batch.spec.num_routes: task for task in given}

        def give(number: int) -> None:
            publish(ctx.step.run, tasks[number].name, pieces.give(number), tasks[number].entry.consumers)

        with pieces.given_within(tasks, give):
            return backward.handler(ctx)

    return backward._replace(handler=handler)


@carries_out(S)
def _sum(ctx: ActionContext) -> Payload | None:
    """Add up in the order of stages and routes."""
    (pieces, number), (stage, _, index), spec = _pieces(ctx), ctx.task.entry.action, ctx.step.batch.spec
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
