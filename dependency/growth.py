"""The check that a relation bounds the activations that are held, where the schedule promises no number."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .errors import ScheduleError
from .memory import UNSURE, WINDOW, Lives, Memory
from .program import peaks_in_order
from .spec import Spec, overrides

_NAMES_NOTHING = ". Its `after` names nothing for any action; if it tests a kind by a text, write `a.kind is F`"


def check_growth(memory: Memory, worker: int, check_runs: Callable[[Spec, Iterable[int]], None]) -> None:
    """Check that not more and more is held at some timing than in order, the more microbatches there are.

    A flush that holds everything is a choice; a bound that a late gradient removes is not.

    Args:
        check_runs: raises if a schedule cannot run.

    Raises:
        ScheduleError: nothing bounds the activations that are held.
    """
    wrong = None
    # Twice, as the first number of microbatches may be too small for a wide window.
    for _ in range(2):
        try:
            memory = memory.of_more
            check_runs(memory.spec, [worker])
            wrong = _grows(memory, worker)
        except Exception:
            break  # the schedule does not run this many
        if wrong is None:
            return
    if wrong is not None:
        raise ScheduleError(*wrong)


def _grows(memory: Memory, worker: int) -> tuple[str, str] | None:
    """Return the fault, with a drawing, if the worst timing holds far more than the worker's order does."""
    in_order = peaks_in_order(entry.action for entry in memory.program(worker))
    half, more = len(in_order) // 2, len(in_order) * 3 // 4  # at the end there may be fewer edges

    def is_bounded(lives: Lives) -> bool:
        return lives.most[more] - in_order[more] <= lives.most[half] - in_order[half]

    lives, is_exact = memory.at_any_timing(worker, is_bounded)
    if is_bounded(lives):
        return None
    from .draw import draw_held

    spec, number = memory.spec, memory.spec.num_microbatches
    everywhere = (action for w in range(spec.num_workers) for action in spec.own_actions(w))
    idle = overrides(type(spec), "after") and not any(list(spec.after(action)) for action in everywhere)
    return (
        f"worker {worker} may keep the activations of {lives.most[-1]} forwards, of {number} microbatches, "
        f"when gradients are late{UNSURE * (not is_exact)}, but its order keeps {in_order[-1]}: "
        f"nothing in the relation bounds memory, it grows with the microbatches. {WINDOW}{_NAMES_NOTHING * idle}",
        draw_held(lives.run_to_most(), in_order[-1]),
    )
