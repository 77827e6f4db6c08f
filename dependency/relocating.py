"""A schedule on replicas without the workers that have died: live replicas of a stage run the microbatches of the dead.

Only the place of actions changes. The relation, the slots and the order of sums depend on the logical replica alone, so
the proof that nothing deadlocks stays, and every bit stays.

All live replicas of a stage share the microbatches of a dead replica in parts, cut in the order of its gradients' sum.
A part hands (`H`) its sums to the next part, which adds to them. The last part ends the step for the replica.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, TypeVar

from .action import Action, F, H, join_route, split_route
from .declared import Handover
from .errors import StageLost
from .order import has_slot, local_order
from .reductions import Replica, on_route
from .replicating import Replicated, replicated
from .spec import Spec, Transformation, transformed

_Number = TypeVar("_Number", int, float)

#: a worker, and its actions that add to the gradients of a dead replica, in order
Share = tuple[int, list[Action]]


def relocated(spec: Spec, gone: frozenset[int], cuts: bool = True) -> Spec:
    """Return `spec`, which has all its workers, without the workers `gone`.

    Args:
        cuts: whether several workers share a dead replica's microbatches, if slots order their actions.

    Raises:
        StageLost: a stage has no live replica.
    """
    if not gone:
        return spec
    cuts = cuts and has_slot(spec)
    said = f"without {sorted(gone)}" + ", uncut" * (not cuts)
    cls = transformed(Relocated, type(spec), said, gone=gone, cuts=cuts, of_all=type(spec))
    made = cls(num_workers=spec.num_workers, num_microbatches=spec.num_microbatches, **spec.parameters())
    for stage in range(made.num_stages):
        made.place(stage, 0)
    return made


class Relocated(Transformation):
    """A schedule that has lost workers."""

    gone: ClassVar[frozenset[int]]
    cuts: ClassVar[bool]
    #: the schedule with all its workers
    of_all: ClassVar[type[Spec]]

    @cached_property
    def _whole(self) -> Spec:
        count = self.num_microbatches
        return self.of_all(num_workers=self.num_workers, num_microbatches=count, **self.parameters())

    @property
    def workers(self) -> list[int]:
        return [worker for worker in super().workers if worker not in self.gone]

    def unsliced(self) -> Spec:
        whole = self._whole.unsliced()
        return self if whole is self._whole else relocated(whole, self.gone, self.cuts)

    # --- the dead replicas

    @cached_property
    def _heirs(self) -> dict[Replica, tuple[int, ...]]:
        """By dead replica, all workers that may run its microbatches."""
        replicas = ((stage, route) for stage in range(self.num_stages) for route in range(self.num_routes))
        return {each: self._heirs_of(*each) for each in replicas if self._whole.place(*each) in self.gone}

    def _heirs_of(self, stage: int, route: int) -> tuple[int, ...]:
        # With several routes in a replica, the same route of another replica: its slots differ.
        own_routes = self.num_routes // self.parallelism.replicas
        alike = range(route % own_routes, self.num_routes, own_routes)
        for routes in alike, range(self.num_routes):
            if live := [at for each in routes if (at := self._whole.place(stage, each)) not in self.gone]:
                if not self.cuts:
                    return (live[route // own_routes % len(live)],)
                # The parts of a worker's stages begin on different workers, so that the load is even in a step.
                turn = sum(other < stage for other, _ in self._whole.hosted(self._whole.place(stage, route)))
                return (*live[turn % len(live) :], *live[: turn % len(live)])
        raise StageLost(f"stage {stage} has no live replica: go on from a checkpoint (--max-restarts does)")

    @cached_property
    def _shares(self) -> dict[Replica, list[Share]]:
        """By dead replica, the workers that run its microbatches, in the order of sums; the last one ends its step."""
        together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for (stage, route), heirs in self._heirs.items():
            together.setdefault((stage, heirs), []).append(route)
        found: dict[Replica, list[Share]] = {}
        for (stage, heirs), routes in together.items():
            sums = [self._sums(stage, route) for route in routes]
            ends, begin = self._ends(stage, heirs, sum(map(len, sums))), 0
            for route, own in zip(routes, sums, strict=True):
                cuts = zip(heirs, pairwise(min(max(end - begin, 0), len(own)) for end in (0, *ends)), strict=True)
                parts = [(heir, own[a:b]) for heir, (a, b) in cuts if a < b]
                found[stage, route], begin = parts or [(heirs[0], [])], begin + len(own)
        return found

    def _sums(self, stage: int, route: int) -> list[Action]:
        """Return the actions that add to the gradients of a replica, in order."""
        order = local_order(self._whole, self._whole.place(stage, route))
        return [a for a in order if a.kind.accumulates and a.stage == stage and self.route(a.index) == route]

    def _ends(self, stage: int, heirs: Sequence[int], count: int) -> list[int]:
        """Return the ends of the heirs' parts in `count` microbatches, by which all heirs run equally many in total."""
        slices = len(self.parallelism.slices)  # slices of a microbatch stay together
        own = Counter(self._whole.worker(F(stage, m)) for m in range(0, self.num_microbatches, slices))
        fair = (count // slices + sum(own[heir] for heir in heirs)) / len(heirs)
        ends = accumulate(max(0.0, fair - own[heir]) for heir in heirs)
        *within, _ = (min(count, slices * round(end)) for end in ends)
        return [*within, count]

    @cached_property
    def handovers(self) -> tuple[Handover, ...]:
        return tuple(
            (before[-1], H(stage, join_route(number, route, self.num_routes)), behind[0])
            for (stage, route), shares in self._shares.items()
            for number, ((_, before), (_, behind)) in enumerate(pairwise(shares))
        )

    # --- places

    @cached_property
    def _moved(self) -> dict[tuple[int, int], int]:
        """By stage and microbatch of dead replicas, the worker that runs them."""
        shares = (share for shares in self._shares.values() for share in shares)
        return {(action.stage, action.index): worker for worker, actions in shares for action in actions}

    def place(self, stage: int, route: int) -> int:
        own = self._whole.place(stage, route)
        return own if own not in self.gone else self._shares[stage, route][-1][0]

    def worker(self, action: Action) -> int:
        stage, kind, index = action
        if kind is H:
            number, route = split_route(index, self.num_routes)
            return self._shares[stage, route][number][0]
        if kind.per_microbatch and (stage, index) in self._moved:
            return self._moved[stage, index]
        return super().worker(action)

    def carried(self, worker: int) -> list[Replica]:
        own = [] if worker in self.gone else self._whole.hosted(worker)
        return sorted([*own, *(dead for dead, heirs in self._heirs.items() if worker in heirs)])

    def own_actions(self, worker: int) -> Iterator[Action]:
        for stage, route in self.carried(worker):
            for m in on_route(self, range(self.num_microbatches), route):
                if self._moved.get((stage, m), worker) == worker:
                    yield from self.actions(stage, m)

    # --- of a worker

    def program(self, worker: int) -> Iterable[Action]:
        own = set(self.carried(worker))
        # One dead worker's program after the other, in one order everywhere: so no two programs wait for each other.
        for each in sorted(self._with_work_here(worker)):
            for action in self._whole.program(each):
                if (action.stage, self.route(action.index)) in own:
                    yield action

    def activation_limit(self, worker: int) -> int | None:
        return _total(self._whole.activation_limit(each) for each in self._with_work_here(worker))

    def peak_activations(self, worker: int) -> int | None:
        return _total(self._whole.peak_activations(each) for each in self._with_work_here(worker))

    def _with_work_here(self, worker: int) -> set[int]:
        """Return the workers of the whole schedule with work that `worker` does."""
        return {self._whole.place(*each) for each in self.carried(worker)}


def _total(limits: Iterable[_Number | None]) -> _Number | None:
    """Return the sum; None if one of them is no limit."""
    found = list(limits)
    return None if None in found else sum(each for each in found if each is not None)


def reshaped(spec: Spec, num_workers: int, replicas: int) -> Spec:
    """Return `spec` on `num_workers` workers, which are numbered from 0, in several replicas.

    Raises:
        ConfigError: the schedule has no such numbers.
    """
    cls = spec.of_one if isinstance(spec, Replicated) else type(spec)
    cls = replicated(cls, replace(spec.parallelism, replicas=replicas))
    return cls(num_workers=num_workers, num_microbatches=spec.num_microbatches, **spec.parameters())


def renumbered(spec: Spec, workers: Sequence[int], numbers: range | None) -> Spec:
    """Return `spec`, which has several replicas, on these workers of a job that began with the workers `numbers`."""
    said = f"on workers {','.join(map(str, workers))}"
    cls = transformed(Renumbered, type(spec), said, at=tuple(workers), numbers=numbers)
    return cls(num_workers=spec.num_workers, num_microbatches=spec.num_microbatches, **spec.parameters())


class Renumbered(Transformation):
    """A schedule of several replicas in which the workers' numbers need not be 0 to `num_workers` - 1."""

    #: by worker of the schedule, its number in the job
    at: ClassVar[tuple[int, ...]]

    @property
    def workers(self) -> Sequence[int]:
        return self.at

    def unsliced(self) -> Spec:
        found = super().unsliced()
        return self if found is self else renumbered(found, self.at, self.numbers)

    def place(self, stage: int, route: int) -> int:
        return self.at[super().place(stage, route)]

    def own_place(self, worker: int) -> tuple[int, int]:
        return super().own_place(self.at.index(worker))
