"""The shards of a worker in each epoch of an elastic job: replicas of dead workers fall to it, newcomers get theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from .checkpoints.newcomer import state_of, take_state
from .checkpoints.resumption import Resumption
from .dependency import ConfigError, Spec, StageLost, check
from .dependency.relocating import relocated
from .workers.actor import WorkerActor
from .workers.compute.torch_internals import BatchNorm

if TYPE_CHECKING:
    from .model.batches.microbatches import Microbatches
    from .model.batches.step_inputs import StepEnd
    from .model.shard_maker import ShardMaker
    from .workers.compute.shard import Shard
    from .workers.step import StepInput


class ElasticRun(Protocol):
    """A run of one schedule, which workers leave when they die."""

    spec: Spec
    actors: list[WorkerActor]
    epoch: int
    process: int
    end: StepEnd
    facts: dict[str, Any]
    results: Resumption
    settle: Callable[[], object]

    @property
    def shards(self) -> Iterator[Shard]:
        """The shards of this process."""

    def begin(self, spec: Spec) -> None:
        """Run `spec` from now on."""

    def inputs_now(self, batch: Microbatches, actor: WorkerActor, *, train: bool) -> StepInput:
        """Return a worker's input for the shards and rows that it has now."""


class Heir:
    """A worker's shards from epoch to epoch.

    Args:
        session: with shards that `maker` has made.

    Raises:
        ConfigError: replicas of the model differ.
    """

    def __init__(self, session: ElasticRun, maker: ShardMaker) -> None:
        _refuse_own_statistics(session)
        self._session, self._maker, self._actor = session, maker, session.actors[0]
        #: the schedule with all its workers
        self._whole = session.spec

    def take_over(self, gone: frozenset[int], comes: Collection[int]) -> None:
        """Give newcomers their state, and host the shards that fall to this worker, without the workers `gone`."""
        session, actor = self._session, self._actor
        # Where gradients stay over several steps, those of a replica stay on one worker.
        without = partial(relocated, self._whole, cuts=session.end.updates(0))
        spec = without(gone)
        check(spec, actor.worker)
        self._give_state(without(gone | frozenset(comes)), sorted(comes))
        held = {place: actor.shards[place] for place in self._whole.hosted(actor.worker)}
        for shard in held.values():
            shard.turn()
            shard.lodging = None  # the guests of the epoch before leave
        for stage, route in spec.carried(actor.worker):
            if (stage, route) not in held:
                like = next(shard for (other, _), shard in held.items() if other == stage)
                held[stage, route] = self._maker.guest(spec, stage, route, like, actor.backend.device)
        actor.host(dict(sorted(held.items())), spec.hosted(actor.worker))
        session.begin(spec)

    def _give_state(self, spec: Spec, comes: Collection[int]) -> None:
        """Give each newcomer the state of a live replica of its stages.

        Args:
            spec: without newcomers.
        """
        actor = self._actor
        for taker, (stage, route) in ((each, place) for each in comes for place in self._whole.hosted(each)):
            giver, own = spec.place(stage, route), None
            if actor.worker == giver:
                has = (shard for (other, _), shard in actor.shards.items() if other == stage and not shard.is_guest)
                own = state_of(next(has))
            if (given := actor.hand(f"state of {stage}/{route}", own, [giver], [taker])) is not None:
                take_state(actor.shards[stage, route], route, self._whole.num_routes, given[0])

    def refuse_changing(self) -> None:
        """Refuse to host replicas with forwards that change modules: such a state has died with its worker.

        Raises:
            StageLost: forwards change modules.
        """
        for shard in self._session.shards if self._session.epoch else ():
            if shard.lodging is not None and (shard.state.weights or shard.recomputation.changes):
                raise StageLost(
                    f"stage {shard.stage}: forwards change buffers or attributes of modules, and those of a replica "
                    "have died with its worker: go on from a checkpoint (--max-restarts does)"
                )


def _refuse_own_statistics(session: ElasticRun) -> None:
    """Refuse batch normalisations: the running statistics of a replica are on its worker alone.

    Raises:
        ConfigError: there is one.
    """
    for shard in session.shards:
        for module in shard.slice.modules:
            if isinstance(module, BatchNorm) and module.running_mean is not None:
                raise ConfigError(
                    f"--elastic: {type(module).__name__} has running statistics of its replica alone, which would die "
                    "with it: pass track_running_stats=False, or take another normalisation"
                )
