"""What workers run for batches of so many microbatches, compiled once for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..dependency import Asked, Part, Spec, check, entries


class Programs:
    """Parts of some workers.

    Args:
        workers: those of this process; `spec` has been checked for them.
    """

    def __init__(self, spec: Spec, workers: Sequence[int]) -> None:
        self._workers = workers
        self._plans = {spec.num_microbatches: spec}
        self._spec = spec
        self._parts: dict[tuple[Spec, int, bool, Asked], Part] = {}

    def part(
        self, num_microbatches: int, worker: int, train: bool, asked: Asked, chained: Callable[[], Collection[int]]
    ) -> Part:
        """Return what `worker` runs in a step or, without `train`, in an evaluation.

        Args:
            asked: as for `entries`.
            chained: returns it, as for `entries`.

        Raises:
            ScheduleError: so many microbatches cannot run.
        """
        if num_microbatches not in self._plans:
            spec = replace(self._spec, num_microbatches=num_microbatches)
            for each in self._workers:
                check(spec, each)
            self._plans[num_microbatches] = spec
        key = self._plans[num_microbatches], worker, train, asked
        if key not in self._parts:
            after = chained()
            program = entries(key[0], worker, forward_only=not train, asked=asked, chained=after)
            self._parts[key] = Part(key[0], worker, program, after)
        return self._parts[key]
