"""Handlers of the exchange of gradients and parameters, across replicas and tied stages; few pipelines load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dependency import A, G, H, P, S, reduction_tree
from .handlers import carries_out
from .step import ActionContext
from .transport.payload import Payload

if TYPE_CHECKING:
    from .compute.parts.ownership import Ownership


def _ownership(ctx: ActionContext) -> Ownership:
    """Return the pieces of the shard, with the gradients of the action's update."""
    pieces = ctx.task.shard.updating.pieces
    assert pieces is not None
    return pieces


def _number(ctx: ActionContext) -> int:
    """Return the number of the action's piece among those of an update."""
    action, tree = ctx.task.entry.action, reduction_tree(ctx.step.batch.spec, ctx.step.batch.reductions)
    piece = tree.piece(action)
    assert piece is not None
    return piece.number - piece.update * tree.num_parts(action.stage)


@carries_out(H)
def _hand_on(ctx: ActionContext) -> Payload:
    return _ownership(ctx).hand_on()


@carries_out(G)
def _give(ctx: ActionContext) -> Payload:
    return _ownership(ctx).give(_number(ctx))


@carries_out(S)
def _sum(ctx: ActionContext) -> Payload | None:
    """Add up in the order of stages and routes."""
    action = ctx.task.entry.action
    tree = reduction_tree(ctx.step.batch.spec, ctx.step.batch.reductions)
    parts = [ctx.worker.backend.ready(ctx.step.payloads.pop(source)) for source in ctx.task.entry.sources]
    return _ownership(ctx).sum(_number(ctx), parts, tree.of_holders(S, action).index(action))


@carries_out(P)
def _give_parameters(ctx: ActionContext) -> Payload:
    return _ownership(ctx).updated(_number(ctx))


@carries_out(A)
def _take_parameters(ctx: ActionContext) -> None:
    for source in ctx.task.entry.sources:
        if source.kind is P:  # not taken out: another stage here may hold them too
            _ownership(ctx).adopt(ctx.worker.backend.ready(ctx.step.payloads[source]))
    ctx.task.shard.updating.adopted()
