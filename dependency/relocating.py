"""A schedule on replicas without the workers that have died: live replicas of a stage host the shards of the dead.

Only `place` changes. The relation, the slots and the order of sums depend on the logical replica alone, so the proof
that nothing deadlocks stays, and every bit stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeVar

from .action import Action
from .errors import StageLost
from .spec import Spec, Transformation, transformed

_Number = TypeVar("_Number", int, float)


def relocated(spec: Spec, gone: frozenset[int]) -> Spec:
    """Return `spec`, which has all its workers, without the workers `gone`.

    Raises:
        StageLost: a stage has no live replica.
    """
    if not gone:
        return spec
    cls = transformed(Relocated, type(spec), f"without {sorted(gone)}", gone=gone)
    made = cls(num_workers=spec.num_workers, num_microbatches=spec.num_microbatches, **spec.parameters())
    for stage in range(made.num_stages):
        made.place(stage, 0)
    return made


class Relocated(Transformation):
    """A schedule that has lost workers."""

    gone: ClassVar[frozenset[int]]

    @property
    def workers(self) -> list[int]:
        return [worker for worker in super().workers if worker not in self.gone]

    def place(self, stage: int, route: int) -> int:
        own = super().place(stage, route)
        if own not in self.gone:
            return own
        # With several routes in a replica, the same route of another replica: its slots differ.
        own_routes = self.num_routes // self.parallelism.replicas
        alike = range(route % own_routes, self.num_routes, own_routes)
        for routes in alike, range(self.num_routes):
            if live := [at for each in routes if (at := super(Relocated, self).place(stage, each)) not in self.gone]:
                return live[route // own_routes % len(live)]
        raise StageLost(f"stage {stage} has no live replica: go on from a checkpoint (--max-restarts does)")

    def unsliced(self) -> Spec:
        whole = super().unsliced()
        return self if whole is self else relocated(whole, self.gone)

    def _carried(self, worker: int) -> list[int]:
        """Return the workers of the whole schedule with work that `worker` does."""
        return sorted({super(Relocated, self).place(stage, route) for stage, route in self.hosted(worker)})

    def program(self, worker: int) -> Iterable[Action]:
        own = set(self.hosted(worker))
        # One dead worker's program after the other, in one order everywhere: so no two programs wait for each other.
        for each in self._carried(worker):
            for action in super().program(each):
                if (action.stage, self.route(action.index)) in own:
                    yield action

    def activation_limit(self, worker: int) -> int | None:
        return _total(super(Relocated, self).activation_limit(each) for each in self._carried(worker))

    def peak_activations(self, worker: int) -> int | None:
        return _total(super(Relocated, self).peak_activations(each) for each in self._carried(worker))

    def peak_size(self, worker: int) -> float | None:
        return _total(super(Relocated, self).peak_size(each) for each in self._carried(worker))


def _total(limits: Iterable[_Number | None]) -> _Number | None:
    """Return the sum; None if one of them is no limit."""
    found = list(limits)
    return None if None in found else sum(each for each in found if each is not None)
