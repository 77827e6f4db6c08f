"""A step of several members together: collectives in one order, sums over members, and one meeting in the first update.

Only compute actions may hold collectives: a control action would wait for a member that waits in the next forward.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..dependency import Action, Disagreement, F, I, Kind, Part, R, U, W
from .compute.modules.digest import digest
from .compute.parts.divided import added, is_divided, like, local
from .compute.parts.members import Members
from .compute.result import Result
from .compute.shard import Shard
from .handlers import complete_gradients
from .step import ActionContext, Around, Bound

if TYPE_CHECKING:
    from .compute.parts.fsdp import Gathered


def joint(bound: Bound, part: Part, members: Members) -> Bound:
    """Return the tasks of a part, with the members' work around the computing ones."""
    order = [part.entries[number].action for number in part.queues["compute"]]
    gathered = {shard: _gathered(shard) for shard in {bound.tasks[action].shard for action in order}}
    backwards: dict[Shard, list[Action]] = {}
    for action in (action for action in order if action.kind.accumulates):
        backwards.setdefault(bound.tasks[action].shard, []).append(action)
    sums = {shard: SummedGradients(shard, members, gathered[shard]) for shard in backwards}
    updates = [action for action in order if action.kind is U]
    tasks, history = dict(bound.tasks), History()
    lasts = {bound.tasks[action].shard: action for action in order if action.kind is not U}
    for action, following in zip(order, [*order[1:], None], strict=True):
        task, around = tasks[action], list[Around]([history.noting])
        layers = gathered[task.shard]
        if layers is not None and action.kind is not U and members.kept is not None:
            is_last = action == lasts[task.shard]
            after = following.kind if following and tasks[following].shard is task.shard else U
            held = held_layers(layers.layers, members.kept, action.kind, None if is_last else after)
            around.append(partial(_gathering, layers, held, is_last))
        if action.kind.accumulates or action.kind is I:
            of_shard = backwards[task.shard]
            around.append(partial(sums[task.shard].backward, action == of_shard[0], action == of_shard[-1]))
        elif action.kind is U:
            around.append(partial(_meeting, members, history if action == updates[0] else None))
        # No milestones: within a backward its gradients are this member's alone.
        tasks[action] = task._replace(around=(*around, *task.around), milestones=())
    return bound._replace(tasks=tasks)


class History:
    """A checksum of the actions that have computed, which members compare when they meet."""

    def __init__(self) -> None:
        self.checksum = 0

    @contextmanager
    def noting(self, ctx: ActionContext) -> Iterator[None]:
        """Note an action."""
        self.checksum = zlib.crc32(ctx.task.name.encode(), self.checksum)
        yield


def _gathered(shard: Shard) -> Gathered | None:
    """Return the layers of a shard that FSDP2 gathers; None: it has loaded no FSDP2."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from .compute.parts.fsdp import Gathered

    return Gathered(shard.slice.own)


@contextmanager
def _gathering(gathered: Gathered, held: Sequence[Any], is_last: bool, ctx: ActionContext) -> Iterator[None]:
    """Let some layers stay whole behind an action; behind the last one of a shard none does."""
    # A forward is observed with divided parameters.
    gathered.hold(() if ctx.task.shard.state.is_looking else held)
    yield
    if is_last:
        gathered.release()


def held_layers(layers: Sequence[Any], kept: bool, kind: Kind, following: Kind | None) -> Sequence[Any]:
    """Return the layers that stay whole behind an action: all, none, or the one between it and the next action.

    Args:
        following: kind of the worker's next action if it has the same shard, else U; None: the shard's last one.
    """
    if following is None or kept or not layers:
        return layers if following is not None else ()
    if following is U or W in (kind, following):
        return ()
    end, begin = layers[-1 if kind in (F, R) else 0], layers[0 if following in (F, R) else -1]
    return [end] if end is begin else ()


class SummedGradients:
    """The gradients of a shard, which members sum once a step or after each microbatch."""

    def __init__(self, shard: Shard, members: Members, gathered: Gathered | None) -> None:
        self._members, self._gathered = members, gathered
        self._whole, self._all = members.sums(shard.updating.parameters), shard.updating.parameters
        self._sums, self._updating = shard.stage in members.summing, shard.updating
        #: gradients of whole parameters that are summed already
        self._aside: dict[str, Tensor] = {}

    @contextmanager
    def backward(self, is_first: bool, is_last: bool, ctx: ActionContext) -> Iterator[None]:
        """Sum the gradients that are complete behind an action of backward."""
        kind, each = ctx.task.entry.action.kind, self._members.per_microbatch
        split = kind in (I, W)
        if self._gathered is not None:
            # A backward of weights alone brings FSDP2 no gradients, or on the first stage too few.
            self._gathered.expect(sums=(each or is_last) and not split, last=is_last)
        if kind is I:
            yield
            return
        if each or is_first:
            self._set_aside()
        yield
        if self._gathered is not None and (split or each or is_last):
            self._gathered.take_gradients(sums=each or is_last, alone=split)
        if each or is_last:
            self._sum()
        if self._gathered is not None and self._gathered.layers and is_last:
            self._forget_missing(self._gathered.missing())
        for parameter in self._all.values() if is_last else ():
            parameter.grad = added(parameter.grad, parameter)

    def _forget_missing(self, missing: set[nn.Parameter]) -> None:
        """Forget the gradients that no member had, which are zeros."""
        if not self._members.any(bool(missing)):
            return
        own = {n for n, parameter in self._all.items() if parameter in missing and n not in self._updating.held}
        for name in set.intersection(*self._members.exchange(own)):
            self._all[name].grad = None

    def _set_aside(self) -> None:
        self._aside = {name: p.grad for name, p in self._whole if p.grad is not None}
        for _, parameter in self._whole:
            parameter.grad = None

    def _sum(self) -> None:
        if not self._sums:
            return
        sums = self._members.sum({name: parameter.grad for name, parameter in self._whole})
        for name, parameter in self._whole:
            before, total = self._aside.pop(name, None), sums[name]
            if total is not None:
                total = like(parameter if parameter.grad is None else parameter.grad, total)
            parameter.grad = total if before is None else before if total is None else before.add_(total)


@contextmanager
def _meeting(members: Members, history: History | None, ctx: ActionContext) -> Iterator[None]:
    """Meet before the first update of a step; divide sums by the weight that all planes have."""
    step, updating = ctx.step, ctx.task.shard.updating
    if history is not None:
        _meet(members, ctx, history.checksum)
    result = step.tally.result
    if result is not None and result.summed and step.batch.updates:
        complete_gradients(ctx, ctx.task.shard, ctx.task.entry.action.index)
        divisor = updating.weight + result.divisor
        updating.divide(divisor)
        if history is not None and result.norm_tensor is not None:
            result.norm_tensor = result.norm_tensor / divisor
    yield


def _meet(members: Members, ctx: ActionContext, checksum: int) -> None:
    """Join the planes' results of a step: losses, requests to stop, norms, overflows.

    Raises:
        Disagreement: members have run different actions, or hold different weights.
    """
    step, result = ctx.step, ctx.step.tally.result
    assert result is not None
    norm, finite = result.norm_tensor, result.finite_tensor
    own_norm = None if norm is None else (float(norm), norm.dtype)
    parts, is_finite = [dict(part) for part in result.parts], finite is None or bool(finite)
    known = (checksum, _sampled(members, ctx)), parts, own_norm, is_finite
    met = members.exchange(known)
    if any(each[0] != known[0] for each in met):
        why = "members of a worker have run different actions, or hold different weights"
        raise Disagreement(f"step {step.number}: {why}: layers must compute alike on all members")
    joined = Result(_parts(members, [each[1] for each in met]), result.outputs, result.rows)
    if norms := [each[2] for each in met if each[2] is not None]:  # a plane may count no parameter
        values, (dtype, *_) = zip(*norms, strict=True)
        joined.norm_tensor = torch.tensor(values, dtype=torch.float64).norm().to(ctx.worker.backend.device, dtype)
    if finite is not None:
        joined.finite_tensor = torch.tensor(all(each[3] for each in met), device=finite.device)
    step.tally.result = joined


def _parts(members: Members, of_planes: list[list[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the parts of a result over all planes, each microbatch by its number in the whole batch."""
    if not members.rows:  # all planes have the same losses
        stop = any(part["stop"] for parts in of_planes for part in parts)
        return [{**part, "stop": stop} for part in of_planes[members.index]]
    found = []
    for plane, parts in enumerate(of_planes[:: members.alike]):
        for part in map(dict, parts):
            if "microbatches" in part:
                numbers = [members.in_whole(m, plane) for m in array("q", part["microbatches"])]
                part["microbatches"] = array("q", numbers).tobytes()
            found.append(part)
    return found


def _sampled(members: Members, ctx: ActionContext) -> int:
    """Return a digest of one parameter that all members hold whole, in each step another one."""
    named = ((n, p) for shard in ctx.worker.shards.values() for n, p in shard.updating.parameters.items())
    alike = [p for n, p in named if n not in members.alone and not is_divided(p)]
    return digest([local(alike[ctx.step.number % len(alike)])]) if alike else 0
