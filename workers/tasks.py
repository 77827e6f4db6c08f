"""Bind the actions of a worker's part to its shards and handlers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from ..dependency import Action, B, ConfigError, F, Order, Part, R, Reductions, W, reduction_tree
from .compute.modules.torch_internals import keep_donated_buffers
from .compute.shard import Shard
from .handlers import handler_of
from .step import Around, Bound, Question, Task
from .transport.outbox import DONE

if TYPE_CHECKING:
    from .compute.parts.members import Members


def bound(part: Part, shards: dict[tuple[int, int], Shard], members: Members | None, reductions: Reductions) -> Bound:
    """Return `part`, compiled for `reductions`, bound to a worker with these shards, which members may share."""
    own = tasks(part, shards, reductions)
    names: dict[tuple[int, bool], list[str]] = {}
    arriving = {task.name: action for action, task in own.items() if action.kind.resource == "copy"}
    for action, worker, carries in part.pulls:
        name = str(action) if carries else str(action) + DONE
        arriving[name] = action
        names.setdefault((worker, action.kind.resource != "control"), []).append(name)
    found = Bound(own, [Question(peer, those, computes) for (peer, computes), those in names.items()], arriving)
    if members is None:
        return found
    from .joint import joint

    return joint(found, part, members)


def tasks(part: Part, shards: dict[tuple[int, int], Shard], reductions: Reductions) -> dict[Action, Task]:
    """Return a task for every action of `part`, on a worker with these shards."""
    spec, found, tree = part.spec, {}, reduction_tree(part.spec, reductions)
    handed = {first: hand for _, hand, first in spec.handovers}
    if part.queues["link"]:
        from . import exchange  # noqa: F401  registers handlers
    for entry in part.entries:
        stage, kind, index = entry.action
        chain = [a.kind for a in spec.actions(stage, index)] if kind.per_microbatch else []
        saves = kind.way == 1 and any(other not in (F, R, B) for other in chain)
        recomputes = kind.way == 1 and R in chain
        place = part.shard(entry.action)
        if saves:
            keep_donated_buffers()
        announced = tuple(milestone.number for milestone in part.milestones.get(entry.action, ()))
        shard, around = shards[place], list[Around]()
        if shard.versions is not None and kind.resource != "control":
            about = entry.action if kind.per_microbatch else tree.update_of(entry.action)
            around.append(partial(shard.versions.around, about))
        if shard.lodging is not None:
            from .surviving import in_place  # few workers have several replicas of a stage

            around.append(partial(in_place, shard.lodging, handed.get(entry.action)))
        name, is_last = str(entry.action), stage == spec.last_stage
        found[entry.action] = Task(
            entry, name, name + DONE, shard, handler_of(kind), tuple(around), saves, recomputes, is_last, announced
        )
    return found


def refuse_disorder(part: Part, shards: dict[tuple[int, int], Shard]) -> None:
    """Refuse a schedule that runs forwards of stages with buffers otherwise than in the order of microbatches.

    One process runs them in that order, so a forward would read state that a later microbatch has written.

    Raises:
        ConfigError: it does.
    """
    last: dict[tuple[int, int], int] = {}
    for action in (entry.action for entry in part.entries if entry.action.kind is F):
        place = part.shard(action)
        if action.index < last.get(place, 0) and shards[place].stateful:
            why = f"has buffers, which a forward may write, and the schedule runs {last[place]} before {action.index}"
            raise ConfigError(f"stage {action.stage}: {why}; let after(F(stage, m)) name F(stage, m - 1)")
        last[place] = action.index


def refuse_collectives(part: Part, order: Order, shards: Iterable[Shard]) -> None:
    """Refuse stages of several devices where their collectives would go wrong.

    Raises:
        ConfigError: backward is split, which skips the hooks of sharded parameters; or actions run in the order of
            arrivals, so that collectives of different microbatches would meet.
    """
    splits = any(entry.action.kind is W for entry in part.entries)
    for shard in shards if splits or order == "ready" else ():
        sharded = any(type(parameter).__name__ == "DTensor" for parameter in shard.parameters())
        if sharded or (order == "ready" and any(isinstance(module, nn.SyncBatchNorm) for module in shard.slice.own)):
            why = "layers make collectives (DTensor, SyncBatchNorm), which need one order on all devices"
            fix = 'pass order="fixed", and for DTensor a schedule with whole backwards, such as 1f1b'
            raise ConfigError(f"stage {shard.stage}: {why}: {fix}")
