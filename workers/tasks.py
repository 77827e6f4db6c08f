"""Bind the actions of a worker's part to its shards and handlers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..dependency import Action, B, ConfigError, F, G, Order, Part, R, S, W
from .compute.module_state import ModuleState
from .compute.shard import Shard
from .compute.torch_internals import keep_donated_buffers
from .handlers import ActionContext, Handler, Task, handler_of
from .transport.payload import Payload


def tasks(part: Part, shards: dict[tuple[int, int], Shard]) -> dict[Action, Task]:
    """Return a task for every action of `part`, on a worker with these shards."""
    spec, found = part.spec, {}
    exchanges = any(entry.action.kind in (G, S) for entry in part.entries)
    if exchanges:
        from . import exchanging  # registers handlers, which few runs need
    watched = {place: _Watched(handler_of(F)) for place in _disordered(part)}
    for entry in part.entries:
        stage, kind, index = entry.action
        chain = [a.kind for a in spec.actions(stage, index)] if kind.per_microbatch else []
        saves = kind.way == 1 and any(other not in (F, R, B) for other in chain)
        recomputes = kind.way == 1 and R in chain
        place = part.shard(entry.action)
        handler: Handler = watched[place] if kind is F and place in watched else handler_of(kind)
        if saves:
            keep_donated_buffers()
        is_last = stage == spec.last_stage
        found[entry.action] = Task(entry, str(entry.action), shards[place], handler, saves, recomputes, is_last)
    if exchanges:
        for action, given in _given_by(part).items():
            found[action] = exchanging.giving(found[action], [found[each] for each in given])
    return found


def _given_by(part: Part) -> dict[Action, list[Action]]:
    """Return, by last backward of a shard, which gradients other workers take of it."""
    found: dict[Action, list[Action]] = {}
    for entry in part.entries:
        if entry.action.kind is G and not entry.here:
            for need in entry.own:
                if need.kind is B:
                    found.setdefault(need, []).append(entry.action)
    return found


def refuse_collectives(part: Part, order: Order, shards: Iterable[Shard]) -> None:
    """Refuse stages of several devices where their collectives would go wrong.

    Raises:
        ConfigError: backward is split, which goes round the hooks of sharded parameters, or actions run in the order in
            which inputs arrive, so that collectives of different microbatches would meet.
    """
    splits = any(entry.action.kind is W for entry in part.entries)
    if not (splits or order == "ready"):
        return
    for shard in shards:
        sharded = any(type(parameter).__name__ == "DTensor" for parameter in shard.parameters())
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        if sharded and splits:
            raise ConfigError(
                f"stage {shard.stage}: parameters are sharded over several devices (DTensor, as by fully_shard), whose "
                "gradients are reduced behind a whole backward: take a schedule that does not split it, such as 1f1b"
            )
        if order == "ready" and (sharded or (joined and any(isinstance(m, nn.SyncBatchNorm) for m in shard.slice.own))):
            raise ConfigError(
                f"stage {shard.stage}: layers make collectives (DTensor, SyncBatchNorm), which have to come in one "
                'order on all devices: pass order="fixed"'
            )


def _disordered(part: Part) -> set[tuple[int, int]]:
    """Return (stage, route) of shards that run forwards out of microbatch order."""
    last: dict[tuple[int, int], int] = {}
    found = set()
    for action in (entry.action for entry in part.entries):
        if action.kind is F:
            place = part.shard(action)
            if action.index < last.get(place, 0):
                found.add(place)
            last[place] = action.index
    return found


class _Watched:
    """Forward handler of a shard whose forwards run out of microbatch order.

    One process runs microbatches in order, so no forward may read module state that a later microbatch has written.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._run = -1
        #: microbatch -> modules whose state its forward has changed
        self._changed: dict[int, list[nn.Module]] = {}

    def __call__(self, ctx: ActionContext) -> Payload | None:
        shard, m = ctx.task.shard, ctx.microbatch
        if ctx.step.run != self._run:
            self._run, self._changed = ctx.step.run, {}
        own = shard.slice.own
        before = ModuleState(own)
        payload = self._handler(ctx)
        written = set(shard.written_weights)
        holders = [module for module in own if not written.isdisjoint(module._parameters.values())] if written else []
        self._changed[m] = changed = before.changed() or holders
        for later in (each for each in self._changed if each > m):
            if guilty := changed or self._changed[later]:
                raise ConfigError(
                    f"stage {shard.stage}: a {type(guilty[0]).__name__} changes what it holds in its forwards, which "
                    f"one process runs in the order of microbatches, and the schedule runs {later} before {m}; let "
                    "after(F(stage, m)) name F(stage, m - 1), and put them into that order"
                )
        return payload
