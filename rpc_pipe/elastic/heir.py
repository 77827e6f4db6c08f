"""The shards of a worker in each epoch of an elastic job: replicas of dead workers fall to it, newcomers get theirs.

Other numbers of stages and replicas, for the workers that are there (`rpc-pipe run --elastic MIN:MAX`):

    rest ── epoch with places ── shards of the other cut ── tensors by the unsplit model's names ── "moved" ── go on

One worker chooses, by the times of the last steps. The old shards stay until every worker has sent "moved", which is
the commit. If no live worker has received "moved" from all, the old shape stays. If one has, all hold the state of the
new shape, and take it. The batch and its microbatches stay, so losses are the same within rounding.
"""

import json
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from ..arguments import describe
from ..checkpoints.newcomer import move
from ..dependency import ConfigError, PipeError, Spec, StageLost, check
from ..dependency.relocating import relocated, renumbered, reshaped
from ..launching import launcher_link as link
from ..launching.epochs import READY, SHAPE, Roster
from ..model.shard_maker import ShardMaker
from ..session import Session
from ..workers.compute.modules.buffer_mirror import BufferMirror, mirror_of
from ..workers.compute.shard import Shard
from ..workers.compute.stash import Lodging
from ..workers.hooks import Listener, StepRecord


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
    why = f"stage {shard.stage}: {why}, and those of a replica have died with its worker"
    return StageLost(f"{why}: go on from a checkpoint (--max-restarts does)")


#: most shapes that are priced, and the number of measured steps for the prices
_MOST_PRICED, _LAST_STEPS = 8, 4
#: part of the first choice's step below which another shape is chosen: measured times have noise
_CLEARLY = 0.95


class _Cut(NamedTuple):
    """The shards of this worker in another shape, which begins with an epoch."""

    number: int
    spec: Spec
    maker: ShardMaker
    shards: dict[tuple[int, int], Shard]


def shapes(spec: Spec, least: int, most: int, num_layers: int) -> list[Spec]:
    """Return `spec` in all shapes for `least` to `most` workers, the first choice first.

    A shape has two replicas at least, and a replica has `least // 2` workers at least: the model fits into these. Most
    workers come first, and then the number of workers of a replica that is nearest to that of `spec`.
    """
    first = spec.num_workers // spec.parallelism.replicas
    pairs = [(n, r) for n in range(least // 2, most // 2 + 1) for r in range(2, most // n + 1) if n * r >= least]
    pairs.sort(key=lambda pair: (-pair[0] * pair[1], abs(pair[0] - first), -pair[0]))
    return [made for pair in pairs if (made := _possible(spec, *pair, num_layers)) is not None]


def _possible(spec: Spec, per_replica: int, replicas: int, num_layers: int) -> Spec | None:
    """Return a schedule in a shape; None: it cannot be."""
    with suppress(PipeError):
        made = reshaped(spec, per_replica * replicas, replicas)
        check(made, 0)
        rows = spec.num_microbatches // len(spec.parallelism.slices)
        return made if made.num_stages <= num_layers and replicas <= rows else None
    return None


class _StepTimes(Listener):
    """Keeps the times of the last steps of a worker."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=_LAST_STEPS)

    def step_finished(self, record: StepRecord) -> None:
        self.records.append(record)

    def steps(self) -> list[tuple[int, list[Any], list[Any]]]:
        """Return them for `predicted_ms`."""
        return [
            (each.step, [(str(a), *times) for a, *times in each.actions], [(str(a), *how) for a, *how in each.arrivals])
            for each in self.records
        ]


class Shapes:
    """The shapes of a job, which change where workers have been missing for long, or have joined.

    Args:
        heir: with the worker's shards.
        bounds: the least and the most workers.

    Attributes:
        leaving: live workers without state of the shape, or a place in it.
    """

    def __init__(self, heir: Heir, bounds: tuple[int, int], session: Session) -> None:
        self._heir, self._session, self._actor = heir, session, session.actors[0]
        self._numbers = range(session.spec.num_workers)
        #: the epoch that began with the shape; 0: the start of the job
        self._number = 0
        #: shards of a shape that some workers may not have
        self._cut: _Cut | None = None
        self.leaving: set[int] = set()
        least, most = bounds
        self._shapes = shapes(session.spec, least, most, len(session.partition.block_names))
        self._last = _StepTimes()
        self._actor.listeners.add(self._last)
        if not self._shapes:
            why = f"no stages times replicas of {type(session.spec).__name__} are so many workers"
            raise ConfigError(f"--elastic {least}:{most}: {why}; take {max(2, least - 1)}:{most}")

    @property
    def places(self) -> list[int]:
        """By number of live workers, how many of them have a place in a shape."""
        fitting = map(self._fitting, range(len(self._numbers) + 1))
        return [max((each.num_workers for each in found), default=0) for found in fitting]

    def begin(self, epoch: Roster, comes: Collection[int]) -> Collection[int]:
        """Begin an epoch, in another shape if it has places; return its workers without state.

        Args:
            comes: workers of the epoch without state, before that.
        """
        actor = self._actor
        self._agree()
        if epoch.places:
            actor.resume(actor.carrier, actor.step)
            self._session.epoch = epoch.number
            (placed, text), comes = self._morph(epoch, comes), ()
            if actor.worker == min(actor.carrier.workers):
                link.tell(kind=SHAPE, text=text, live=len(actor.carrier.workers), placed=placed)
        self._heir.tell_ready()
        return comes

    def _agree(self) -> None:
        """Take the newest shape that a live worker has."""
        actor, cut, self._cut = self._actor, self._cut, None
        own = self._number if cut is None else cut.number
        told = dict(zip(sorted(actor.carrier.workers), actor.exchange("shape", [self._number, own]), strict=True))
        top = max(number for number, _ in told.values())
        if cut is not None and self._number < top == cut.number:
            self._take(cut)
        without = {worker for worker, has in told.items() if top not in has}  # newcomers: a change was broken off
        self.leaving = without | (told.keys() - {*self._heir.whole.workers} if top else set())

    def _fitting(self, live: int) -> list[Spec]:
        """Return the shapes for at most `live` workers, the first choice first."""
        return [each for each in self._shapes if each.num_workers <= live]

    def _chosen(self, live: list[int], comes: Collection[int]) -> tuple[Spec, str]:
        """Return the shape with a clearly shorter predicted step, or the first choice; and the prediction in words.

        Where all workers are back, so is the typed shape: its sums have the order of the undisturbed run.
        """
        actor, fitting = self._actor, self._fitting(len(live))[:_MOST_PRICED]
        decides, choice = min({*live}.difference(comes)), json.dumps([0, ""])
        shards = actor.shards.items()
        gradients = [(stage, sum(each.nbytes for each in shard.parameters())) for (stage, _), shard in shards]
        told = actor.hand("measured", json.dumps([self._last.steps(), gradients]), live, [decides])
        if told is not None:
            from ..planning.pricing import predicted_ms

            of_all = {at: json.loads(each) for at, each in zip(live, told, strict=True) if at not in comes}
            steps = {worker: found for worker, (found, _) in of_all.items()}
            sizes = {stage: size for _, found in of_all.values() for stage, size in found}
            ms = predicted_ms(steps, sizes, [*map(len, self._heir.maker.model.ranges)], fitting)
            said = ", ".join(f"{_named(each)} {took:.1f} ms" for each, took in zip(fitting, ms, strict=False))
            is_free = ms and len(live) < len(self._numbers) and min(ms) < _CLEARLY * ms[0]
            best = ms.index(min(ms)) if is_free else 0
            choice = json.dumps([best, f"; predicted of a step: {said}" * bool(ms)])
        [number, text] = json.loads((actor.hand("choice", choice, [decides], live) or [choice])[0])
        return fitting[number], text

    def _morph(self, epoch: Roster, comes: Collection[int]) -> tuple[int, str]:
        """Change to another shape; return for how many workers it has places, 0 if it stays, and a sentence.

        Args:
            comes: workers of the epoch without state.
        """
        actor, live = self._actor, sorted(self._actor.carrier.workers)
        spec, predicted = self._chosen(live, comes)
        was, failure, sent = _named(self._heir.whole), "", 0
        try:
            cut = self._made(epoch.number, renumbered(spec, live[: spec.num_workers], self._numbers))
        except ConfigError as error:
            failure = str(error)
        failures = [*filter(None, actor.exchange("can change", failure))]
        if not failures:
            try:
                sent = move(actor, self._heir.given(epoch.gone, comes), cut.shards, spec.num_routes)
                self._cut = cut
            except ConfigError as error:
                failure = str(error)
            told = actor.exchange("moved", [failure, sent])
            failures = [each for each, _ in told if each]
        if failures:
            self._cut, self.leaving = None, set(comes)
            return 0, f"{was} stay: {failures[0]}"
        self._take(cut)
        self._cut, self.leaving = None, set(live[spec.num_workers :])
        placed, moved = f"{spec.num_workers} of {len(live)} live workers", sum(each for _, each in told)
        return spec.num_workers, f"{was} become {_named(spec)} on {placed}, {moved:,} bytes moved{predicted}"

    def _made(self, number: int, spec: Spec) -> _Cut:
        """Make this worker's shards of another shape.

        Raises:
            ConfigError: they could not do as its shards do now.
        """
        for shard in self._session.shards:
            if shard.state.weights or mirror_of(shard).changes_more or shard.updating.on_gradients:
                raise ConfigError(f"forwards of stage {shard.stage} change more than buffers, or has on_gradients")
        maker, worker = self._heir.maker.anew(spec.num_stages), self._actor.worker
        shards = maker.hosted(spec, worker, self._actor.backend.device, [worker], copied=True)
        for (_, route), shard in shards.items():
            make_mirror(shard, route)
        return _Cut(number, spec, maker, shards)

    def _take(self, cut: _Cut) -> None:
        """Switch to the shards of another shape."""
        session, (self._number, self._heir.whole, self._heir.maker, shards) = self._session, cut
        session.partition, session.end.divided = self._heir.maker.model, self._heir.maker.divided
        session.described = describe(self._heir.whole, session.partition.ranges, self._heir.maker.seed, session.options)
        self._actor.host(shards, shards)
        self._last.records.clear()  # of other stages
        self._heir.maker.end([*shards.values()])
        session.made()


def _named(spec: Spec) -> str:
    """Return the shape of a schedule in words."""
    stages, replicas = spec.num_stages, spec.parallelism.replicas
    return f"{stages} stage{'s' * (stages > 1)} x {replicas} replica{'s' * (replicas > 1)}"
