"""Handlers of actions on a worker: a function a kind. A new kind is one row of the table and one function."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..dependency import B, C, ConfigError, D, F, I, Kind, N, R, T, U, V, W, reduction_tree
from ..dependency.action import split_route
from .compute.modules.borders import ForwardArgs
from .compute.result import Result, clips, losses_tree, total_norm
from .compute.shard import Shard
from .step import ActionContext, Handler, Step
from .transport.payload import Payload, Tree, pack, unpack

_handlers: dict[Kind, Handler] = {}


def carries_out(kind: Kind) -> Callable[[Handler], Handler]:
    """Register a function as the handler of `kind`."""

    def register(handler: Handler) -> Handler:
        _handlers[kind] = handler
        return handler

    return register


def handler_of(kind: Kind) -> Handler:
    """Return the handler of `kind`."""
    return _handlers[kind]


_NO_PAYLOAD = pack(())


@carries_out(F)
def _forward(ctx: ActionContext) -> Payload | None:
    worker, step, task = ctx.worker, ctx.step, ctx.task
    data, shard, at = step.batch.data, task.shard, task.entry.action.index
    if data.decode is not None:
        return data.decode(ctx)
    m = step.offsets.microbatch + at  # `ctx.microbatch`
    payload, fields = ctx.source(), None
    if shard.slice.takes_fields:
        fields = worker.backend.load(data.inputs[at])
        payload = _NO_PAYLOAD if payload is None else payload
    elif payload is None:
        payload = worker.given = pack(worker.backend.load(data.inputs[at]))
    target = share = scale = None
    if task.is_last and data.targets is not None:
        target, share = worker.backend.load(data.targets[at]), data.shares[at]
        scale = None if data.scales is None else data.scales[at]
    place = None if data.places is None else data.places[at]
    given = ForwardArgs(step.number, m, payload, fields, target, share, task.saves, task.recomputes, scale, place)
    tree, loss = shard.forward(given)
    if loss is not None:
        step.tally.losses[m] = loss
        return None
    output = shard.output(tree)
    if not task.is_last:
        return output
    step.tally.outputs[m] = unpack(output)
    return None


@carries_out(B)
def _backward(ctx: ActionContext) -> Payload:
    shard, pieces = ctx.task.shard, ctx.task.shard.updating.pieces
    if pieces is None or not ctx.task.milestones:
        return shard.backward(ctx.microbatch, ctx.source())
    with pieces.announced(ctx.task.milestones, ctx.reached):
        return shard.backward(ctx.microbatch, ctx.source())


@carries_out(I)
def _backward_inputs(ctx: ActionContext) -> Payload:
    return ctx.task.shard.backward_inputs(ctx.microbatch, ctx.source())


@carries_out(W)
def _backward_weights(ctx: ActionContext) -> None:
    ctx.task.shard.backward_weights(ctx.microbatch)


@carries_out(R)
def _recompute(ctx: ActionContext) -> None:
    ctx.task.shard.recompute(ctx.step.number, ctx.microbatch)


@carries_out(C)
def _collect_loss(ctx: ActionContext) -> Payload:
    """Append this worker's losses and stop request to the lists from workers further from the root of the tree."""
    worker, step = ctx.worker, ctx.step
    parts = [part for payload in _taken(ctx, C) for part in unpack(payload)]
    if step.batch.spec.last_stage in (stage for stage, _ in worker.shards) and _is_first_node(ctx):
        part: dict[str, Tree] = {"stop": worker.stop_requested or worker.mailbox.carrier.stop_requested}
        if worker.rest_requested:
            part["rest"] = True
        if step.batch.data.targets is not None:
            part |= losses_tree(step.tally.losses)
        parts.append(part)
    return pack(parts)


@carries_out(D)
def _tell_loss(ctx: ActionContext) -> Payload:
    (payload,) = _taken(ctx, D, C)
    step = ctx.step
    if not _is_first_node(ctx):  # it has the result, which members may have joined since
        return payload
    step.tally.result = Result(unpack(payload), step.tally.outputs, step.batch.data.rows)
    if ctx.worker.stop_requested and not step.tally.result.stop:
        ctx.worker.mailbox.carrier.request_stop(step.batch.spec.place(step.batch.spec.last_stage, 0))
    batch = step.batch
    if step.tally.result.summed and batch.train and batch.spec.takes_steps and not batch.reductions.weight:
        raise ConfigError("loss_fn: gave a mean before and gives (sum, weight) now; it must always give the same")
    return payload


@carries_out(N)
def _collect_norms(ctx: ActionContext) -> Payload:
    """Merge the norms of this worker's gradients, keyed by parameter rank, with the norms from workers further away.

    With a scaled loss the flags for finite gradients travel along.
    """
    norms = dict(ctx.step.end.own_norms) if _is_first_node(ctx) else {}
    finite: list[Tensor] = []
    for payload in _taken(ctx, N):
        others, flags = unpack(payload)
        norms, finite = norms | others, finite + flags
    if _is_first_node(ctx) and ctx.step.batch.updates and not ctx.step.batch.reductions.validated:
        for stage, route in ctx.step.batch.spec.hosted(ctx.worker.worker):
            if route == 0 or ctx.step.batch.spec.parallelism.zero:
                shard = ctx.worker.shards[stage, route]
                shard.turn(ctx.step.offsets.update + route)
                complete_gradients(ctx, shard, route)
                if shard.updating.training.measures_norm:
                    norms |= shard.updating.gradient_norms()
                if shard.updating.scale.enabled:
                    finite.append(ctx.step.end.finite[shard])
    return pack((norms, finite))


@carries_out(T)
def _tell_norm(ctx: ActionContext) -> Payload:
    """Compute the global gradient norm in parameter order, with the bits of `clip_grad_norm_` on the whole model."""
    (payload,) = _taken(ctx, T, N)
    norm, finite = unpack(payload)
    if isinstance(norm, dict):
        norm, finite = ctx.worker.backend.load((norm, finite))  # other workers' norms have arrived on the host
        norm = total_norm([norm[rank] for rank in sorted(norm)], ctx.worker.backend.device) if norm else None
        finite = torch.stack(finite).all() if finite else None
    if _is_first_node(ctx):
        assert ctx.step.tally.result is not None
        ctx.step.tally.result.norm_tensor, ctx.step.tally.result.finite_tensor = norm, finite
    return pack((norm, finite))


@carries_out(U)
def _update(ctx: ActionContext) -> None:
    worker, step, shard, index = ctx.worker, ctx.step, ctx.task.shard, ctx.task.entry.action.index
    result, spec = step.tally.result, step.batch.spec
    if not step.batch.updates:
        shard.hold(result.divisor if result is not None and result.summed else 0.0)
        return
    complete_gradients(ctx, shard, index)
    if step.batch.reductions.validated:
        if index == 0:
            step.end.own_norms |= shard.updating.gradient_norms()
        if worker.max_grad_norm is None and step.batch.skips is None:
            shard.update()
        else:
            step.end.early[shard] = shard.update_early()
        return
    if shard.versions is not None:
        shard.updating.tell_gradients()
        shard.versions.leave()
    if worker.max_grad_norm is not None:
        if result is not None and result.norm_tensor is not None:
            shard.updating.clip(worker.max_grad_norm, worker.backend.load(result.norm_tensor))
        elif not spec.takes_steps:
            shard.updating.clip_by_own_norm(worker.max_grad_norm)
    # The only synchronisations of host and device, and only with a scaled loss or a rule to skip by.
    finite = result is None or result.finite_tensor is None or bool(result.finite_tensor)
    shard.update(finite=finite, skipped=_is_skipped(step))
    if spec.averaging_pull and shard.versions is not None:
        shard.versions.exchange(spec.averaging_pull)


@carries_out(V)
def _validate(ctx: ActionContext) -> None:
    """Redo an early update if gradients have to be clipped, or skip it. Synchronises with the device for the norm."""
    step, shard, max_norm = ctx.step, ctx.task.shard, ctx.worker.max_grad_norm
    before = step.end.early.pop(shard, None)
    if before is None:  # the norm is measured alone
        return
    assert step.tally.result is not None and step.tally.result.norm_tensor is not None
    skipped = _is_skipped(step)
    if skipped or clips(max_norm, step.tally.result.norm_tensor):
        shard.update_again(before, max_norm, ctx.worker.backend.load(step.tally.result.norm_tensor), skipped)
        step.end.taken_back = True


# --- shared by several handlers


def complete_gradients(ctx: ActionContext, shard: Shard, index: int) -> None:
    """Take the sums over all holders of a parameter, and divide them by the step's weight if the loss is a sum; once
    per update, which has `index`."""
    step, spec = ctx.step, ctx.step.batch.spec
    if (shard, index) in step.end.completed:
        return
    step.end.completed.add((shard, index))
    if shard.updating.pieces is not None and not spec.parallelism.zero:
        number, route = split_route(index, spec.num_routes)
        for each in reduction_tree(spec, step.batch.reductions).sums(shard.stage, route, number):
            # Not taken out: several holders may be on this worker.
            shard.updating.pieces.take(ctx.worker.backend.ready(step.payloads[each]))
    alone = ctx.worker.members is None  # else this plane's weight is only a part
    if alone and step.tally.result is not None and step.batch.reductions.weight and step.tally.result.summed:
        shard.updating.divide(shard.updating.weight + step.tally.result.divisor)
    if shard.updating.scale.enabled:
        step.end.finite[shard] = shard.updating.unscale()
    if spec.synchronous:
        shard.updating.tell_gradients()


def _is_skipped(step: Step) -> bool:
    """Return whether the user's rule leaves the update of a step out."""
    result, skips = step.tally.result, step.batch.skips
    if skips is not None and result is not None and result.norm is not None:
        result.skipped = skips(step.number, result.norm)
    return result is not None and result.skipped


def _is_first_node(ctx: ActionContext) -> bool:
    """Return whether the worker contributes its values here; at its other nodes of the tree it only forwards."""
    stage, _, route = ctx.task.entry.action
    return reduction_tree(ctx.step.batch.spec).own[ctx.worker.worker] == (stage, route)


def _taken(ctx: ActionContext, *kinds: Kind) -> list[Payload]:
    """Return the input payloads that actions of these kinds produced. They stay: several nodes of a worker read one."""
    return [ctx.step.payloads[source] for source in ctx.task.entry.sources if source.kind in kinds]
