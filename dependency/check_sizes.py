"""The check of a bound on the sizes of microbatches that a worker holds, at the worst timing."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ScheduleError
from .memory import Lives
from .spec import Spec

#: sums of sizes that are no whole numbers are rounded
_ROUNDED = 1 + 1e-9


def check_sizes(spec: Spec, worker: int, lives: Lives) -> None:
    """Check the claim of `spec.peak_size`.

    Raises:
        ScheduleError: at some timing the worker may hold more.
    """
    bound, held = spec.peak_size(worker), heaviest(lives, spec.sizes)
    if bound is not None and held > bound * _ROUNDED:
        raise ScheduleError(
            f"worker {worker} may keep microbatches of size {held:g} when gradients are late, but peak_size({worker}) "
            f"promises {bound:g}: let after(F(s, m)) name the B or W of a later microbatch"
        )


def heaviest(lives: Lives, sizes: Sequence[float]) -> float:
    """Return a bound on the sum of sizes of microbatches that may be held at once; exact for one chain of ends.

    The last one that has begun needs some ends. All lives before it that have not ended by then may overlap.
    """
    begun, most = 0.0, 0.0
    ended: dict[int, list[float]] = {}  # by chain, the sum of sizes of its first ends
    for action, ends in lives.own:
        size = sizes[action.index % len(sizes)]
        if action.kind.holds > 0:
            begun += size
            most = max(most, begun - sum(ended[chain][count] for chain, count in ends.items()))
        else:
            sums = next(own for at, count in ends.items() if len(own := ended.setdefault(at, [0.0])) == count)
            sums.append(sums[-1] + size)
    return most
