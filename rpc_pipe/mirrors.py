"""Optimizer states that two workers have each (`zero=1`, `mirror=True`), from epoch to epoch of an elastic job."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .dependency import Reductions, Spec, StageLost, reduction_tree
from .workers.actor import WorkerActor
from .workers.compute.mirrored import MirroredUpdating
from .workers.transport.payload import pack, unpack

#: by owner of parameters (stage, route), the workers with their states
Holders = dict[tuple[int, int], list[int]]


def _hosts(actor: WorkerActor) -> Iterator[tuple[int, MirroredUpdating]]:
    """Yield the updates of this worker with their stages."""
    for (stage, _), shard in actor.shards.items():
        if isinstance(shard.updating, MirroredUpdating):
            yield stage, shard.updating


def complete(actor: WorkerActor, spec: Spec, divided: Reductions, comes: Collection[int]) -> Holders:
    """Hand each other the parameters that are missing from a step that stands; return the workers with states.

    Args:
        spec: the schedule on the live workers.
        divided: how parameters are divided.
        comes: newcomers, which have no states.

    Raises:
        StageLost: states have died with both workers that had them.
    """
    own = list(_hosts(actor))
    for _, each in own if actor.worker in comes else ():
        each.states.clear()
    told = actor.exchange("mirrors", [(stage, sorted(each.states), each.adopts_late) for stage, each in own])
    has = dict(zip(sorted(actor.carrier.workers), told, strict=True))
    places = [(stage, route) for stage in range(spec.num_stages) for route in range(spec.num_routes)]
    holders = {(s, r): [w for w in has if any(s == at and r in each for at, each, _ in has[w])] for s, r in places}
    for stage, route in places:
        if not holders[stage, route]:
            raise StageLost(
                f"stage {stage}: optimizer states of replica {route} have died with their mirror: go on from a "
                "checkpoint (--max-restarts does)"
            )
    if any(late for each in told for _, _, late in each):
        for place, (giver, *_) in holders.items():
            _hand_parameters(actor, spec, divided, place, giver)
    for _, each in own:
        if each.adopts_late:
            each.adopts_late = False
            each.adopted()
        each.keep(spec)
    return holders


def _hand_parameters(actor: WorkerActor, spec: Spec, divided: Reductions, owner: tuple[int, int], giver: int) -> None:
    """Hand the parameters of an owner to all that have them without their states."""
    (first, route), own = owner, None
    stages = {first}.union(*(tied for tied, _ in divided.tied if tied[0] == first))
    takers = [each for each in sorted(actor.carrier.workers) if any(stage in stages for stage, _ in spec.hosted(each))]
    hosts = [(stage, each, each.pieces) for stage, each in _hosts(actor) if each.pieces is not None]
    if actor.worker == giver:
        pieces = next(pieces for stage, _, pieces in hosts if stage == first)
        own = [(number, unpack(pieces.updated(number))) for number in pieces.numbers(owner)]
    for number, tree in (actor.hand(f"parameters of {owner}", own, [giver], takers) or [[]])[0]:
        for stage, each, pieces in hosts:
            if number in pieces.numbers(owner) and (stage != first or route not in each.states):
                pieces.adopt(pack(tree))


def hand_out(actor: WorkerActor, spec: Spec, holders: Holders) -> None:
    """Hand states to the workers that keep them from now on."""
    for (stage, route), has in holders.items():
        takers = [each for each in reduction_tree(spec).keepers(stage, route) if each not in has]
        hosts = [each for at, each in _hosts(actor) if at == stage]
        own = hosts[0].given(route) if actor.worker == has[0] else None
        if takers and (found := actor.hand(f"states of {stage}/{route}", own, has[:1], takers)) is not None:
            for each in hosts:
                each.take(route, found[0])
