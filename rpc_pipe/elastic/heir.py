"""The shards of a worker in each epoch of an elastic job: replicas of dead workers fall to it, newcomers get theirs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..checkpoints.between_cuts import move
from ..dependency import StageLost, check
from ..dependency.relocating import relocated
from ..launching import launcher_link as link
from ..launching.epochs import READY
from ..workers.compute.lodging import Lodging
from ..workers.compute.modules.buffer_mirror import BufferMirror, mirror_of

if TYPE_CHECKING:
    from ..model.shard_maker import ShardMaker
    from ..session import Session
    from ..workers.compute.shard import Shard


class Heir:
    """A worker's shards from epoch to epoch.

    Args:
        session: with shards that `maker` has made.

    Attributes:
        whole: the schedule with all its workers.
        shapes: the `Shapes` of the job; None: it has one.
    """

    def __init__(self, session: Session, maker: ShardMaker) -> None:
        self._session, self.maker, self._actor = session, maker, session.actors[0]
        self.whole = session.spec
        self.shapes: Any = None
        for (_, route), shard in self._actor.shards.items():
            make_mirror(shard, route)

    @property
    def changes(self) -> bool:
        """Whether forwards change buffers here, as far as it is known."""
        return any(mirror_of(shard).changing for shard in self._actor.shards.values())

    def tell_ready(self) -> None:
        """Report the stages of this worker to the launcher."""
        more = {} if self.shapes is None else {"places": self.shapes.places}
        link.tell(kind=READY, stages=[stage for stage, _ in self.whole.hosted(self._actor.worker)], **more)

    def given(self, gone: frozenset[int], comes: Collection[int]) -> list[int]:
        """Return the stages that this worker gives the state of to newcomers; none if it is a newcomer itself."""
        worker = self._actor.worker
        if worker in comes:
            return []
        spec = relocated(self.whole, gone.union(comes))
        return [stage for stage in range(spec.num_stages) if spec.place(stage, 0) == worker]

    def take_over(self, gone: frozenset[int], comes: Collection[int], changes: bool) -> None:
        """Give newcomers their state, and host the shards that fall to this worker, without the workers `gone`.

        Args:
            changes: whether forwards change buffers on any worker.

        Raises:
            StageLost: buffers have died with a worker.
        """
        session, actor = self._session, self._actor
        # Gradients that stay over several steps, and buffers that each forward changes, stay on one worker.
        spec = relocated(self.whole, gone, cuts=session.end.updates(0) and not changes)
        check(spec, actor.worker)
        if comes:
            taken = actor.shards if actor.worker in comes else {}
            move(actor, self.given(gone, comes), taken, spec.num_routes, same_cut=True)
        held = {place: actor.shards[place] for place in self.whole.hosted(actor.worker)}
        for shard in held.values():
            shard.turn()
            shard.lodging = None  # the guests of the epoch before leave
        for (stage, _), host in list(held.items()):
            routes = [route for other, route in spec.carried(actor.worker) if other == stage]
            fallen, device = [route for route in routes if (stage, route) not in held], actor.backend.device
            guests = {route: self.maker.guest(spec, stage, route, host, device) for route in fallen}
            _part(host, guests)
            held |= {(stage, route): guest for route, guest in guests.items()}
        actor.host(dict(sorted(held.items())), spec.hosted(actor.worker))
        session.begin(spec)

    def refuse_changing(self) -> None:
        """Refuse to host replicas with forwards that change weights or attributes: these have died with their worker.

        Raises:
            StageLost: forwards do.
        """
        for shard in self._session.shards if self._session.epoch else ():
            if shard.lodging is not None and (shard.state.weights or mirror_of(shard).changes_more):
                raise _lost(shard, "forwards change weights or attributes of modules")


def make_mirror(shard: Shard, route: int) -> None:
    """Let a replica have the buffers of all replicas."""
    assert shard.updating.pieces is not None
    shard.mirror = shard.updating.pieces.mirror = BufferMirror(shard, route)


def _part(host: Shard, guests: dict[int, Shard]) -> None:
    """Give guests the buffers of the dead replicas, by their numbers."""
    if not guests:
        return
    assert isinstance(host.lodging, Lodging)
    if mirror_of(host).is_stale:
        raise _lost(host, "buffers have changed since the last update")
    for route, guest in guests.items():
        make_mirror(guest, route)
    places, buffers = mirror_of(host).parted([*guests])
    host.lodging.part(places, dict(zip(guests.values(), buffers, strict=True)))


def _lost(shard: Shard, why: str) -> StageLost:
    return StageLost(
        f"stage {shard.stage}: {why}, and those of a replica have died with its worker: go on from a checkpoint "
        "(--max-restarts does)"
    )
