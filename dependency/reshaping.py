"""A schedule with other numbers of stages and replicas, on the workers that are left of a job.

The workers keep the numbers that they have in the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from .replicating import Replicated, replicated
from .spec import Spec, Transformation, transformed


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
