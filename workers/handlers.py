"""What each kind of action does on a worker: a function a kind. A new kind is one row of the table and one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..dependency import (
    NO_REDUCTIONS,
    Action,
    B,
    C,
    ConfigError,
    D,
    Entry,
    F,
    I,
    Kind,
    N,
    Order,
    Part,
    R,
    Reductions,
    Spec,
    T,
    U,
    V,
    W,
    reduction_tree,
)
from .compute.device import Timestamp
from .compute.module_state import ModuleState
from .compute.result import Losses, Result, clips, total_norm
from .compute.shard import Given, Shard
from .context import Context
from .hooks import Arrived
from .state import WorkerState
from .transport.call import Call
from .transport.payload import Payload, Tree, pack, unpack
from .transport.scatter import Scatter

if TYPE_CHECKING:
    from .compute.snapshot import BeforeUpdate


@dataclass(frozen=True)
class StepInput:
    """The input of one training step, evaluation or prediction on a worker."""

    part: Part
    order: Order
    #: describes the call; other workers compare it with their own
    call: Call
    #: model inputs, one tree per microbatch; read by the worker of stage 0, and by all workers if stages take fields
    inputs: list[Tree]
    #: targets, one tree per microbatch; read by the worker of the last stage. None: return outputs, not the loss
    targets: list[Tree] | None
    #: fraction of the batch's rows in each microbatch
    shares: list[float]
    train: bool = True
    #: results of other stages that an update waits for; `part` was compiled for them
    reductions: Reductions = NO_REDUCTIONS
    #: rows and tokens of the whole batch; 0 tokens if the inputs are not integers
    rows: int = 0
    tokens: int = 0
    #: time (ns) spent waiting for the batch to be read, and the cause: disk, network or decode
    waited: tuple[int, str] = (0, "")
    #: if steps overlap: each microbatch's fraction of the rows of the update that takes its gradients
    scales: list[float] | None = None
    #: if microbatches are slices of sequences: where each begins and ends, and the sequence's length
    places: list[tuple[int, int, int]] | None = None
    #: which worker reads the batch for others; None: every worker reads what it uses
    scatter: Scatter | None = None
    #: if microbatches run in another order than given: their numbers as given, in the order in which they run
    microbatch_order: tuple[int, ...] = ()
    #: whether the step ends with an update; False while gradients accumulate over several steps
    updates: bool = True
    #: whether the pipeline drains after this step although steps overlap, because a checkpoint follows
    last: bool = False

    @property
    def spec(self) -> Spec:
        return self.part.spec


class Task(NamedTuple):
    """An action bound to its shard and handler; reused in every step."""

    entry: Entry
    name: str
    #: under what others are told that it is finished
    done: str
    shard: Shard
    handler: Handler
    #: of a forward: whether its saved tensors are managed here (split backward, offload), and whether it is recomputed
    saves: bool
    recomputes: bool
    #: whether it is of the last stage
    is_last: bool


class Question(NamedTuple):
    """What is pulled of one worker in every step."""

    peer: int
    names: list[str]
    #: whether this worker computes from it
    to_compute: bool


class Bound(NamedTuple):
    """What a part of a schedule means on its worker; made once, for all its steps."""

    tasks: dict[Action, Task]
    questions: list[Question]
    #: by the name by which they arrive
    arriving: dict[str, Action]


@dataclass(eq=False)
class Step:
    """The state of one step on a worker, from its first action to its last."""

    batch: StepInput
    state: WorkerState
    #: its actions on this worker
    tasks: dict[Action, Task]
    #: those that arrive, as of other workers, by name
    arriving: dict[str, Action]
    #: takes in what has arrived, in the middle of an action
    take_in: Callable[[], None]
    #: number under which workers exchange its payloads
    run: int
    #: index of the training step
    number: int
    start_ns: int
    #: received payloads by the action that produced them, on another worker or on this one
    payloads: dict[Action, Payload] = field(default_factory=dict)
    forwards_left: int = 0
    #: parts of the batch that have not arrived from the worker that reads it
    awaited_inputs: set[str] = field(default_factory=set)
    losses: Losses = field(default_factory=Losses)
    outputs: dict[int, Tree] = field(default_factory=dict)
    #: set when `D` has run
    result: Result | None = None
    #: shards whose gradients are complete: summed over replicas and divided by the step's weight
    completed: set[Shard] = field(default_factory=set)
    #: by such shard, with a scaled loss: whether all gradients are finite
    finite: dict[Shard, Tensor] = field(default_factory=dict)
    #: of shards updated before the global gradient norm was known: their own norms, and the state before the update
    own_norms: dict[int, Tensor] = field(default_factory=dict)
    early: dict[Shard, BeforeUpdate] = field(default_factory=dict)
    #: whether such an update was undone, which invalidates what has run of the next step
    taken_back: bool = False
    #: error raised by a step whose weights may still be undone, and the action that raised it
    failure: Exception | None = None
    failed: str = ""
    timestamps: list[tuple[Action, Timestamp, Timestamp]] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)
    #: if steps overlap: offsets of its microbatches, updates and slots within the stream
    first: int = 0
    first_update: int = 0
    before_slots: int = 0
    #: whether it may have to be undone; if so, the state of modules before the first forward of each shard
    undoable: bool = False
    before: dict[Shard, ModuleState] = field(default_factory=dict)


class ActionContext(NamedTuple):
    """An action that is running."""

    worker: Context
    step: Step
    task: Task

    def source(self) -> Payload | None:
        """Take the input payload of the action; None if it has none, as the backward of the loss."""
        sources = self.task.entry.sources
        if not sources:
            return None
        payload, backend = self.step.payloads.pop(sources[0]), self.worker.backend
        self.worker.given = payload = payload if backend.in_step else backend.ready(payload)
        return payload

    @property
    def microbatch(self) -> int:
        """The microbatch index as shards count it: through the whole stream if steps overlap."""
        return self.step.first + self.task.entry.action.index


#: runs an action and returns its payload; actions on the resource `copy` run in a thread of their own
Handler = Callable[[ActionContext], "Payload | None"]
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
    batch, shard, at = step.batch, task.shard, task.entry.action.index
    m = step.first + at  # `ctx.microbatch`
    payload, fields = ctx.source(), None
    if shard.slice.takes_fields:
        fields = worker.backend.load(batch.inputs[at])
        payload = _NO_PAYLOAD if payload is None else payload
    elif payload is None:
        payload = worker.given = pack(worker.backend.load(batch.inputs[at]))
    target = share = scale = None
    if task.is_last and batch.targets is not None:
        shard.losses = step.losses
        target, share = worker.backend.load(batch.targets[at]), batch.shares[at]
        scale = None if batch.scales is None else batch.scales[at]
    place = None if batch.places is None else batch.places[at]
    output = shard.forward(
        Given(step.number, m, payload, fields, target, share, task.saves, task.recomputes, scale, place)
    )
    if not task.is_last:
        return output
    if output is not None:
        step.outputs[m] = unpack(output)
    return None


@carries_out(B)
def _backward(ctx: ActionContext) -> Payload:
    return ctx.task.shard.backward(ctx.microbatch, ctx.source())


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
    """Append this worker's losses and stop request to those from workers further from the root of the tree."""
    worker, step = ctx.worker, ctx.step
    parts = [part for payload in _taken(ctx, C) for part in unpack(payload)]
    if step.batch.spec.last_stage in (stage for stage, _ in worker.shards) and _is_first_node(ctx):
        part: dict[str, Tree] = {"stop": worker.stop_requested}
        if step.batch.targets is not None:
            part |= step.losses.tree()
        parts.append(part)
    return pack(parts)


@carries_out(D)
def _tell_loss(ctx: ActionContext) -> Payload:
    (payload,) = _taken(ctx, D, C)
    step = ctx.step
    step.result = Result(unpack(payload), step.outputs, step.batch.rows)
    if step.result.summed and step.batch.train and step.batch.spec.takes_steps and not step.batch.reductions.weight:
        raise ConfigError("loss_fn: gave a mean before and gives (sum, weight) now; it must always give the same")
    return payload


@carries_out(N)
def _collect_norms(ctx: ActionContext) -> Payload:
    """Merge the norms of this worker's gradients, keyed by parameter rank, with those from workers further away.

    With a scaled loss the flags that say whether gradients are finite travel along.
    """
    norms = dict(ctx.step.own_norms) if _is_first_node(ctx) else {}
    finite: list[Tensor] = []
    for payload in _taken(ctx, N):
        others, flags = unpack(payload)
        norms, finite = norms | others, finite + flags
    if _is_first_node(ctx) and not ctx.step.batch.reductions.validated:
        for (_, route), shard in ctx.worker.shards.items():
            if route == 0 or ctx.step.batch.spec.zero:
                shard.turn_to(ctx.step.first_update + route)
                _complete_gradients(ctx, shard, route)
                if ctx.worker.max_grad_norm is not None:
                    norms |= shard.updating.gradient_norms()
                if shard.updating.scale.enabled:
                    finite.append(ctx.step.finite[shard])
    return pack((norms, finite))


@carries_out(T)
def _tell_norm(ctx: ActionContext) -> Payload:
    """Compute the global gradient norm in parameter order, with the bits of `clip_grad_norm_` on the whole model."""
    (payload,) = _taken(ctx, T, N)
    norm, finite = unpack(payload)
    if isinstance(norm, dict):
        norm, finite = ctx.worker.backend.load((norm, finite))  # those of other workers have arrived on the host
        norm = total_norm([norm[rank] for rank in sorted(norm)], ctx.worker.backend.device) if norm else None
        finite = torch.stack(finite).all() if finite else None
    assert ctx.step.result is not None
    ctx.step.result.norm_tensor, ctx.step.result.finite_tensor = norm, finite
    return pack((norm, finite))


@carries_out(U)
def _update(ctx: ActionContext) -> None:
    worker, step, shard, index = ctx.worker, ctx.step, ctx.task.shard, ctx.task.entry.action.index
    result, spec = step.result, step.batch.spec
    if not step.batch.updates:
        shard.hold(result.divisor if result is not None and result.summed else 0.0)
        return
    shard.turn_to(step.first_update + index)
    _complete_gradients(ctx, shard, index)
    if step.batch.reductions.validated:
        if index == 0:
            step.own_norms |= shard.updating.gradient_norms()
        step.early[shard] = shard.update_early()
        return
    if shard.has_versions:
        shard.updating.tell_gradients()
    if worker.max_grad_norm is not None:
        if result is not None and result.norm_tensor is not None:
            shard.updating.clip(worker.max_grad_norm, worker.backend.load(result.norm_tensor))
        elif not spec.takes_steps:
            shard.updating.clip_by_own_norm(worker.max_grad_norm)
    # The only synchronisation of host and device, and only with a scaled loss.
    shard.update(finite=result is None or result.finite_tensor is None or bool(result.finite_tensor))
    if spec.elasticity:
        shard.exchange(spec.elasticity)


@carries_out(V)
def _validate(ctx: ActionContext) -> None:
    """Redo an early update if the gradients have to be clipped. Synchronises with the device to read the norm."""
    step, shard, max_norm = ctx.step, ctx.task.shard, ctx.worker.max_grad_norm
    before = step.early.pop(shard)
    assert step.result is not None and step.result.norm_tensor is not None and max_norm is not None
    if clips(max_norm, step.result.norm_tensor):
        shard.update_again(before, max_norm, ctx.worker.backend.load(step.result.norm_tensor))
        step.taken_back = True


def _complete_gradients(ctx: ActionContext, shard: Shard, route: int) -> None:
    """Take the sums over all who hold a parameter, and divide them by the step's weight if the loss is a sum; once per
    step."""
    step, spec = ctx.step, ctx.step.batch.spec
    if shard in step.completed:
        return
    step.completed.add(shard)
    if shard.updating.pieces is not None and not spec.zero:
        for each in reduction_tree(spec).sums(shard.stage, route, step.batch.reductions):
            # Not taken out: several who hold them may be on this worker.
            shard.updating.pieces.take(ctx.worker.backend.ready(step.payloads[each]))
    if step.result is not None and step.batch.reductions.weight and step.result.summed:
        shard.updating.divide(shard.updating.weight + step.result.divisor)
    if shard.updating.scale.enabled:
        step.finite[shard] = shard.updating.unscale()
    if spec.synchronous:
        shard.updating.tell_gradients()


def _is_first_node(ctx: ActionContext) -> bool:
    """Return whether the worker contributes its own values here; at its other nodes of the tree it only forwards."""
    stage, _, route = ctx.task.entry.action
    return reduction_tree(ctx.step.batch.spec).own[ctx.worker.worker] == (stage, route)


def _taken(ctx: ActionContext, *kinds: Kind) -> list[Payload]:
    """Return the input payloads that actions of these kinds produced. They stay: several nodes of a worker read one."""
    return [ctx.step.payloads[source] for source in ctx.task.entry.sources if source.kind in kinds]
