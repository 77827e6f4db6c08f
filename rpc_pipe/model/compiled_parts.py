"""The compiled parts of workers, cached by number of microbatches and what a step needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..dependency import Part, Reductions, Spec, check, entries


class CompiledParts:
    """A cache of the parts of this process's workers.

    Args:
        workers: these; `spec` has been checked for them.
    """

    def __init__(self, spec: Spec, workers: Sequence[int]) -> None:
        self._workers = workers
        #: by number of microbatches
        self._specs = {spec.num_microbatches: spec}
        self._spec = spec
        self._parts: dict[tuple[Spec, int, bool, Reductions], Part] = {}

    def part(
        self,
        num_microbatches: int,
        worker: int,
        train: bool,
        reductions: Reductions,
        chained: Callable[[], Collection[int]],
    ) -> Part:
        """Return what `worker` runs in a step or, without `train`, in an evaluation.

        Args:
            reductions: as for `entries`.
            chained: returns it, as for `entries`.

        Raises:
            ScheduleError: the schedule cannot run this number of microbatches.
        """
        if num_microbatches not in self._specs:
            spec = replace(self._spec, num_microbatches=num_microbatches)
            for each in self._workers:
                check(spec, each)
            self._specs[num_microbatches] = spec
        key = self._specs[num_microbatches], worker, train, reductions
        if key not in self._parts:
            after = chained()
            program = entries(key[0], worker, forward_only=not train, reductions=reductions, chained=after)
            self._parts[key] = Part(key[0], worker, program, after)
        return self._parts[key]
