"""Handlers of the exchange of gradients and parameters, across replicas and tied stages; few pipelines load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dependency import A, G, H, P, S, reduction_tree
from ..dependency.indexes import split_route
from .handlers import carries_out
from .step import ActionContext
from .transport.payload import Payload

if TYPE_CHECKING:
    from .compute.parts.ownership import Ownership


def _pieces(ctx: ActionContext) -> tuple[Ownership, int]:
    """Return the pieces of the shard, with the gradients of the action's update, and the number of its piece."""
    pieces = ctx.task.shard.updating.pieces
    assert pieces is not None
    return pieces, split_route(ctx.task.entry.action.index, ctx.step.batch.spec.num_routes)[0]


@carries_out(H)
def _hand_on(ctx: ActionContext) -> Payload:
    return _pieces(ctx)[0].hand_on()


@carries_out(G)
def _give(ctx: ActionContext) -> Payload:
    pieces, number = _pieces(ctx)
    return pieces.give(number)


@carries_out(S)
def _sum(ctx: ActionContext) -> Payload | None:
    """Add up in the order of stages and routes."""
    (pieces, number), action = _pieces(ctx), ctx.task.entry.action
    tree = reduction_tree(ctx.step.batch.spec, ctx.step.batch.reductions)
    parts = [ctx.worker.backend.ready(ctx.step.payloads.pop(source)) for source in ctx.task.entry.sources]
    return pieces.sum(number, parts, tree.of_holders(S, action).index(action))


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
