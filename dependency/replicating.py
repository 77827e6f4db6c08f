"""A schedule on several replicas of the pipeline: data parallelism as routes over other workers.

Microbatch m belongs to replica m % replicas, which runs the schedule on its microbatches. A worker is worker
`rank // replicas` of replica `rank % replicas`: the replicas of a stage are neighbours, and the stages of a replica are
`replicas` apart; if stages are spread, it is the other way round. Gradients are summed in each replica in the order of
its microbatches, and then in the order of the replicas, as for every schedule with routes. Slices of a sequence
(`slicing`) stay together: a replica has all of its microbatches' slices.

Where steps overlap, all replicas count equally many microbatches a step, so that a step has the same length in slots on
all. The last microbatch of a replica may then be missing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from .action import (  # isort: skip
    Action, join_replica, join_route, join_slice, join_step, split_replica, split_route, split_slice, split_step,
)  # fmt: skip
from .action import F
from .declared import Order, Parallelism
from .errors import ConfigError
from .spec import Spec, Transformation, transformed


def replicated(base: type[Spec], parallelism: Parallelism) -> type[Spec]:
    """Return `base` with replicas and with its slices kept; its workers are divided among the replicas.

    Raises:
        ConfigError: from the class that is returned, the workers cannot be divided among the replicas.
    """
    if parallelism.replicas == 1:
        return base
    parallelism = replace(parallelism, slices=base.parallelism.slices)
    zero, bucket, spread = parallelism.zero, parallelism.bucket, parallelism.spread
    said = f", zero {zero}" * (zero > 0) + f", bucket {bucket:g}" * (bucket != Parallelism.bucket)
    said += f", {spread} spread" * (spread != Parallelism.spread)
    name = f"{parallelism.replicas} replicas{said}"
    return transformed(Replicated, base, name, parallelism=parallelism, of_one=base)


class Replicated(Transformation):
    """A schedule on several replicas; each counts its workers and microbatches from 0."""

    #: the schedule of one replica
    of_one: ClassVar[type[Spec]]

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        workers, replicas = self.num_workers, self.parallelism.replicas
        if workers % replicas:
            possible = [n for n in range(1, workers + 1) if workers % n == 0]
            nearest = min(possible, key=lambda n: (abs(n - replicas), n))
            less, more = workers // replicas * replicas, -(-workers // replicas) * replicas
            some = f"{less} or {more}" if less else more
            raise ConfigError(f"replicas {replicas}: must divide {workers} workers; take {some}, or replicas={nearest}")
        self._replicas[0]  # checks the rules of the schedule of one replica

    @cached_property
    def _replicas(self) -> list[Spec]:
        """The spec of each replica."""
        workers, slices = self.num_workers // self.parallelism.replicas, len(self.parallelism.slices)
        every = range(self.num_microbatches // slices)
        begins = [q if self.synchronous else 0 for q in range(self.parallelism.replicas)]
        counts = [max(1, len(every[begin :: self.parallelism.replicas])) * slices for begin in begins]
        made = {n: self.of_one(num_workers=workers, num_microbatches=n, **self.parameters()) for n in {*counts}}
        return [made[n] for n in counts]

    def unsliced(self) -> Spec:
        if len(self.parallelism.slices) == 1:
            return self
        whole = type(self._replicas[0].unsliced())
        cls = replicated(whole, self.parallelism)
        count = max(1, self.num_microbatches // len(self.parallelism.slices))
        return cls(num_workers=self.num_workers, num_microbatches=count, **self.parameters())

    # --- of the pipeline

    @property
    def num_stages(self) -> int:
        return self._replicas[0].num_stages

    @property
    def num_routes(self) -> int:
        return self.parallelism.replicas * self._replicas[0].num_routes

    @property
    def order(self) -> Order:
        return self._replicas[0].order

    def recomputes(self, stage: int) -> bool:
        return self._replicas[0].recomputes(stage)

    # --- of a worker

    def place(self, stage: int, route: int) -> int:
        replica, inner = split_route(route, self._replicas[0].num_routes)
        own = self._replicas[replica].place(stage, inner)
        of_one = self.num_workers // self.parallelism.replicas
        one_by_one = own * self.parallelism.replicas + replica
        return replica * of_one + own if self.parallelism.spread == "stages" else one_by_one

    def own_place(self, worker: int) -> tuple[int, int]:
        """Return the replica of `worker`, and which worker of it `worker` is."""
        if self.parallelism.spread == "stages":
            return divmod(worker, self.num_workers // self.parallelism.replicas)
        own, replica = divmod(worker, self.parallelism.replicas)
        return replica, own

    def program(self, worker: int) -> Iterable[Action]:
        replica, own = self.own_place(worker)
        if replica >= self.num_microbatches // len(self.parallelism.slices):
            return []
        return self._outer(replica, self._replicas[replica].program(own))

    def activation_limit(self, worker: int) -> int | None:
        replica, own = self.own_place(worker)
        return self._replicas[replica].activation_limit(own)

    def peak_activations(self, worker: int) -> int | None:
        replica, own = self.own_place(worker)
        return self._replicas[replica].peak_activations(own)

    # --- of an action

    def _inner(self, action: Action) -> tuple[int, Spec, Action]:
        """Return the replica that runs `action`, its spec, and the action as that spec counts it."""
        if action.kind.per_microbatch:
            (step, index), slices = split_step(action.index, self.num_microbatches), len(self.parallelism.slices)
            microbatch, number = split_slice(index, slices)
            microbatch, replica = split_replica(microbatch, self.parallelism.replicas)
            own = self._replicas[replica].num_microbatches
            index = join_step(step, join_slice(microbatch, number, slices), own)
        else:
            (number, route), routes = split_route(action.index, self.num_routes), self._replicas[0].num_routes
            replica, route = split_route(route, routes)
            index = join_route(number, route, routes)
        return replica, self._replicas[replica], action.kind(action.stage, index)

    def _outer(self, replica: int, actions: Iterable[Action]) -> Iterator[Action]:
        """Yield a replica's actions as the whole counts them.

        An action of a missing microbatch becomes that of the microbatch before, so that windows keep their width.
        """
        count, own = self.num_microbatches, self._replicas[replica].num_microbatches
        replicas, slices, routes = self.parallelism.replicas, len(self.parallelism.slices), self._replicas[0].num_routes
        for action in actions:
            if action.kind.per_microbatch:
                step, index = split_step(action.index, own)
                microbatch, number = split_slice(index, slices)
                index = join_slice(join_replica(microbatch, replica, replicas), number, slices)
                yield action.kind(action.stage, join_step(step, index - replicas * slices * (index >= count), count))
            else:
                number, route = split_route(action.index, routes)
                yield action.kind(action.stage, join_route(number, join_route(replica, route, routes), self.num_routes))

    def route(self, microbatch: int) -> int:
        replica, own, inner = self._inner(F(0, microbatch))
        return replica * own.num_routes + own.route(inner.index)

    def splits(self, stage: int, microbatch: int) -> bool:
        _, own, inner = self._inner(F(stage, microbatch))
        return own.splits(stage, inner.index)

    def version(self, stage: int, microbatch: int) -> int:
        _, own, inner = self._inner(F(stage, microbatch))
        return own.version(stage, inner.index)

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        replica, own, inner = self._inner(F(stage, microbatch))
        return tuple(self._outer(replica, own.actions(stage, inner.index)))

    def after(self, action: Action) -> Iterable[Action]:
        replica, own, inner = self._inner(action)
        return self._outer(replica, own.after(inner))

    def slot(self, action: Action) -> int:
        replica, own, inner = self._inner(action)
        return own.slot(inner) * self.parallelism.replicas + replica
