"""Handlers of H, G, S, P and A: the exchange of gradients across replicas and tied stages."""

from __future__ import annotations

from ..dependency import A, G, H, P, S, reduction_tree
from ..dependency.indexes import route_in, split_route
from .compute.ownership import Ownership
from .handlers import carries_out
from .step import ActionContext
from .transport.payload import Payload


def _pieces(ctx: ActionContext) -> tuple[Ownership, int]:
    """Return the pieces of the shard, with the gradients of the action's update, and the number of its piece."""
    (_, _, index), shard, routes = ctx.task.entry.action, ctx.task.shard, ctx.step.batch.spec.num_routes
    assert shard.updating.pieces is not None
    number, route = split_route(index, routes)
    shard.turn(ctx.step.offsets.update + route)
    return shard.updating.pieces, number


@carries_out(H)
def _hand_on(ctx: ActionContext) -> Payload:
    pieces, _ = _pieces(ctx)
    return pieces.hand_on()


@carries_out(G)
def _give(ctx: ActionContext) -> Payload:
    pieces, number = _pieces(ctx)
    return pieces.give(number)


@carries_out(S)
def _sum(ctx: ActionContext) -> Payload | None:
    """Add up in the order of stages and routes."""
    (pieces, number), (stage, _, index), spec = _pieces(ctx), ctx.task.entry.action, ctx.step.batch.spec
    (piece,) = (p for p in reduction_tree(spec).pieces(stage, ctx.step.batch.reductions) if p.number == number)
    parts = [ctx.worker.backend.ready(ctx.step.payloads.pop(source)) for source in ctx.task.entry.sources]
    return pieces.sum(number, parts, piece.holders(spec.num_routes).index((stage, route_in(index, spec.num_routes))))


@carries_out(P)
def _give_parameters(ctx: ActionContext) -> Payload:
    pieces, number = _pieces(ctx)
    return pieces.updated(number)


@carries_out(A)
def _take_parameters(ctx: ActionContext) -> None:
    pieces, _ = _pieces(ctx)
    if ctx.task.shard.is_guest:  # its host takes them
        return
    for source in ctx.task.entry.sources:
        if source.kind is P:  # not taken out: another stage here may hold them too
            pieces.adopt(ctx.worker.backend.ready(ctx.step.payloads[source]))
    ctx.task.shard.updating.adopted()
