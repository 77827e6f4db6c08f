"""What each kind of action does on a worker: a function a kind. A new kind is one row of the table and one function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..dependency import (
    NOTHING,
    Action,
    Asked,
    B,
    C,
    ConfigError,
    D,
    Entry,
    F,
    G,
    I,
    Kind,
    N,
    Order,
    Part,
    R,
    Spec,
    T,
    U,
    V,
    W,
    end_tree,
    takes_steps,
)
from .compute.device import Mark
from .compute.recomputation import World
from .compute.result import Losses, Result, clips, total_norm
from .compute.shard import Shard
from .compute.slices import loaded
from .compute.stash import StashingShard
from .compute.updating import BeforeUpdate
from .context import Context
from .hooks import Arrived, LayerTime
from .state import WorkerState
from .transport.call import Call
from .transport.lending import Lending
from .transport.payload import Payload, Tree, pack, unpack


@dataclass(frozen=True)
class Batch:
    """What a worker is asked to do: a training step, an evaluation or a prediction."""

    part: Part
    order: Order
    #: what others are told of it
    call: Call
    #: inputs of the model by microbatch; read where stage 0 is, of models that take fields everywhere
    inputs: list[Tree]
    #: targets by microbatch; read where the last stage is. None: outputs are wanted, not the loss
    targets: list[Tree] | None
    #: each microbatch's share of the rows
    shares: list[float]
    train: bool = True
    #: what updates must know of other stages, as `part` was compiled for
    asked: Asked = NOTHING
    #: of the whole batch; tokens are counted if the inputs are whole numbers
    rows: int = 0
    tokens: int = 0
    #: how many ns reading it was waited for, and what for
    waited: tuple[int, str] = (0, "")
    #: each microbatch's share of the rows of the update that takes its gradients, if steps overlap
    scales: list[float] | None = None
    #: who reads the batch, where it is not everybody who uses it
    lending: Lending | None = None
    #: whether its gradients, with those held from steps before, make an update
    updates: bool = True
    #: whether no later step begins before it is complete, though steps overlap: a checkpoint is written behind it
    last: bool = False

    @property
    def spec(self) -> Spec:
        return self.part.spec


class Task(NamedTuple):
    """What an action means on a worker: the same in every step."""

    entry: Entry
    name: str
    shard: Shard
    does: Handler
    #: of a forward: whether what it saves is touched before backward, and whether it is computed again
    saves: bool
    recomputes: bool


@dataclass(eq=False)
class Step:
    """A batch on its way through a worker."""

    batch: Batch
    state: WorkerState
    #: what its actions mean here
    tasks: dict[Action, Task]
    #: under which what is exchanged for it is known between workers
    run: int
    #: of all training steps
    number: int
    start_ns: int
    #: payloads by the action that made them: from other workers, or handed over on this one
    payloads: dict[Action, Payload] = field(default_factory=dict)
    forwards_left: int = 0
    #: what of the batch has not come yet from who reads it
    borrowed: set[str] = field(default_factory=set)
    losses: Losses = field(default_factory=Losses)
    outputs: dict[int, Tree] = field(default_factory=dict)
    #: known from `D` on
    result: Result | None = None
    #: shards whose gradients are those of the whole batch
    completed: set[Shard] = field(default_factory=set)
    #: of those, whether no gradient has overflowed, if the loss was scaled
    finite: dict[Shard, Tensor] = field(default_factory=dict)
    #: of shards that were updated before the norm of all gradients was told: norms of their own, and what was before
    own_norms: dict[int, Tensor] = field(default_factory=dict)
    early: dict[Shard, BeforeUpdate] = field(default_factory=dict)
    #: whether such updates were taken back, so that what has been begun of the next step is wrong
    taken_back: bool = False
    #: what was raised, and by which action, in a step that may be wrong
    failure: Exception | None = None
    failed: str = ""
    marks: list[tuple[Action, Mark, Mark]] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)
    layer_times: list[LayerTime] = field(default_factory=list)
    #: of a stream whose steps overlap: its first microbatch and update there, and how much later its slots are
    first: int = 0
    first_update: int = 0
    before_slots: int = 0
    #: what modules held before it, where it may have to be undone
    before: list[tuple[Shard, World]] = field(default_factory=list)


class Doing(NamedTuple):
    """An action that is carried out."""

    worker: Context
    step: Step
    task: Task

    def source(self) -> Payload | None:
        """Take the payload that the action computes from; None: there is none, as for the loss's gradient."""
        sources = self.task.entry.sources
        if not sources:
            return None
        payload = self.worker.given = self.worker.courier.ready(self.step.payloads.pop(sources[0]))
        return payload

    @property
    def microbatch(self) -> int:
        """The microbatch of the action, as the shard knows it: counted through a stream whose steps overlap."""
        return self.step.first + self.task.entry.action.index


#: carries out an action and returns its payload; on the resource `copy` in a thread of its own
Handler = Callable[[Doing], "Payload | None"]
_handlers: dict[Kind, Handler] = {}


def carries_out(kind: Kind) -> Callable[[Handler], Handler]:
    """Make a function what workers do for `kind`."""

    def register(handler: Handler) -> Handler:
        _handlers[kind] = handler
        return handler

    return register


def handler_of(kind: Kind) -> Handler:
    """Return what workers do for `kind`."""
    return _handlers[kind]


_NO_PAYLOAD = pack(())


@carries_out(F)
def _forward(doing: Doing) -> Payload | None:
    worker, step, task = doing.worker, doing.step, doing.task
    batch, shard, m, at = step.batch, task.shard, doing.microbatch, task.entry.action.index
    payload, fields = doing.source(), None
    if shard.slice.takes_fields:
        fields = loaded(batch.inputs[at], worker.courier.load)
        payload = _NO_PAYLOAD if payload is None else payload
    elif payload is None:
        payload = worker.given = pack(worker.courier.load(batch.inputs[at]))
    run = partial(shard.forward, step.number, m, payload, fields=fields)
    if shard.stage < batch.spec.last_stage:
        return run(split=task.saves, recompute=task.recomputes)
    if batch.targets is None:
        output = run()
        assert output is not None
        step.outputs[m] = unpack(output)
    else:
        target, share = worker.courier.load(batch.targets[at]), batch.shares[at]
        shard.losses = step.losses
        if batch.scales is not None:
            run = partial(run, scale=batch.scales[at])
        run(target=target, share=share, split=task.saves, recompute=task.recomputes)
    return None


@carries_out(B)
def _backward(doing: Doing) -> Payload:
    return doing.task.shard.backward(doing.microbatch, doing.source())


@carries_out(I)
def _backward_inputs(doing: Doing) -> Payload:
    return doing.task.shard.backward_inputs(doing.microbatch, doing.source())


@carries_out(W)
def _backward_weights(doing: Doing) -> None:
    doing.task.shard.backward_weights(doing.microbatch)


@carries_out(R)
def _recompute(doing: Doing) -> None:
    doing.task.shard.recompute(doing.step.number, doing.microbatch)


@carries_out(G)
def _gradients(doing: Doing) -> Payload:
    return _gradients_of(doing.task.shard, doing.step.batch.spec)


def _gradients_of(shard: Shard, spec: Spec) -> Payload:
    return shard.gradients(shared=spec.num_routes == 1)


@carries_out(C)
def _collect_loss(doing: Doing) -> Payload:
    """Put what this worker's last stages have to tell behind what comes from further away."""
    worker, step = doing.worker, doing.step
    parts = [part for payload in _taken(doing, C) for part in unpack(payload)]
    if step.batch.spec.last_stage in (stage for stage, _ in worker.shards) and _is_first_place(doing):
        part: dict[str, Tree] = {"stop": worker.stop_requested}
        if step.batch.targets is not None:
            part |= step.losses.tree()
        parts.append(part)
    return pack(parts)


@carries_out(D)
def _tell_loss(doing: Doing) -> Payload:
    (payload,) = _taken(doing, D, C)
    step = doing.step
    step.result = Result(unpack(payload), step.outputs)
    must_know = step.batch.spec.synchronous or takes_steps(step.batch.spec)
    if step.result.summed and step.batch.train and must_know and not step.batch.asked.weight:
        raise ConfigError("loss_fn: gave a mean before and gives (sum, weight) now; it must always give the same")
    return payload


@carries_out(N)
def _collect_norms(doing: Doing) -> Payload:
    """Put the norms of this worker's gradients to those from further away, by the parameters' ranks.

    With them goes, if the loss was scaled, whether the gradients have overflowed.
    """
    norms = dict(doing.step.own_norms) if _is_first_place(doing) else {}
    finite: list[Tensor] = []
    for payload in _taken(doing, N):
        others, flags = unpack(payload)
        norms, finite = norms | others, finite + flags
    if _is_first_place(doing) and not doing.step.batch.asked.validated:
        for (_, route), shard in doing.worker.shards.items():
            if route == 0:
                update = doing.step.first_update + route
                with shard.showing(update) if isinstance(shard, StashingShard) else nullcontext():
                    _complete_gradients(doing, shard, route)
                    if doing.worker.max_grad_norm is not None:
                        norms |= shard.gradient_norms()
                    if shard.updating.scale.enabled:
                        finite.append(doing.step.finite[shard])
    return pack((norms, finite))


@carries_out(T)
def _tell_norm(doing: Doing) -> Payload:
    """Make the norm of all gradients as `clip_grad_norm_` does of the whole model's, in the order of parameters."""
    (payload,) = _taken(doing, T, N)
    norm, finite = unpack(payload)
    if isinstance(norm, dict):
        norm, finite = doing.worker.courier.load((norm, finite))  # those of other workers have arrived on the host
        norm = total_norm([norm[rank] for rank in sorted(norm)], doing.worker.courier.device) if norm else None
        finite = torch.stack(finite).all() if finite else None
    assert doing.step.result is not None
    doing.step.result.norm_tensor, doing.step.result.finite_tensor = norm, finite
    return pack((norm, finite))


@carries_out(U)
def _update(doing: Doing) -> None:
    worker, step, shard = doing.worker, doing.step, doing.task.shard
    if isinstance(shard, StashingShard):
        _update_version(doing, shard)
        return
    result = step.result
    if not step.batch.updates:
        shard.hold(result.divisor if result is not None and result.summed else 0.0)
        return
    _complete_gradients(doing, shard, doing.task.entry.action.index)
    if step.batch.asked.validated:
        if doing.task.entry.action.index == 0:
            step.own_norms |= shard.gradient_norms()
        step.early[shard] = shard.update_early()
        return
    if result is not None and result.norm_tensor is not None and worker.max_grad_norm is not None:
        shard.clip(worker.max_grad_norm, worker.courier.load(result.norm_tensor))
    # The one place where a worker waits for its device, and only if the loss is scaled.
    shard.update(finite=result is None or result.finite_tensor is None or bool(result.finite_tensor))


@carries_out(V)
def _validate(doing: Doing) -> None:
    """Make an early update again where gradients are to be clipped. Waits for the device: the norm is looked at."""
    step, shard, max_norm = doing.step, doing.task.shard, doing.worker.max_grad_norm
    before = step.early.pop(shard)
    assert step.result is not None and step.result.norm_tensor is not None and max_norm is not None
    if clips(max_norm, step.result.norm_tensor):
        shard.update_again(before, max_norm, doing.worker.courier.load(step.result.norm_tensor))
        step.taken_back = True


def _update_version(doing: Doing, shard: StashingShard) -> None:
    """Make the next version of a shard's weights, from the gradients that belong to it alone."""
    worker, step, index = doing.worker, doing.step, doing.task.entry.action.index
    shard.take_gradients(step.first_update + index)
    if step.batch.asked.weight and shard not in step.completed and step.result is not None:
        shard.updating.divide(step.result.divisor)
    if worker.max_grad_norm is not None:
        if step.result is not None and step.result.norm_tensor is not None:
            shard.clip(worker.max_grad_norm, worker.courier.load(step.result.norm_tensor))
        else:
            shard.updating.clip_by_own_norm(worker.max_grad_norm)
    shard.update()
    if step.batch.spec.elasticity:
        shard.exchange(step.batch.spec.elasticity)


def _complete_gradients(doing: Doing, shard: Shard, route: int) -> None:
    """Sum the gradients of all who hold the parameters, in the order of stages and routes, and divide those of sums by
    the weight; once a step."""
    step, spec = doing.step, doing.step.batch.spec
    if shard in step.completed:
        return
    step.completed.add(shard)
    exchanged = end_tree(spec).exchanged(shard.stage, step.batch.asked) if spec.synchronous else []
    if exchanged:
        ready, own = doing.worker.courier.ready, G(shard.stage, route)
        # Not taken out: several who hold them may be on this worker.
        parts = [_gradients_of(shard, spec) if g == own else ready(step.payloads[g]) for g in exchanged]
        shard.updating.sum_gradients(parts, exchanged.index(own))
    if step.result is not None and step.batch.asked.weight and step.result.summed:
        shard.updating.divide(shard.updating.weight + step.result.divisor)
    if shard.updating.scale.enabled:
        step.finite[shard] = shard.updating.unscale()


def _is_first_place(doing: Doing) -> bool:
    """Tell whether the worker has its say here; elsewhere in the tree it only passes on."""
    stage, _, route = doing.task.entry.action
    return end_tree(doing.step.batch.spec).own[doing.worker.worker] == (stage, route)


def _taken(doing: Doing, *kinds: Kind) -> list[Payload]:
    """Take the payloads that come from actions of these kinds."""
    return [doing.step.payloads.pop(source) for source in doing.task.entry.sources if source.kind in kinds]
