"""Needs of a step in earlier steps of an asynchronous stream, found at a step far from the stream's beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .action import Action
from .declared import Declared
from .indexes import split_step
from .versions import updates_a_step

#: number of a step so far from the beginning of a stream that the beginning has no effect on it
STEADY = 1 << 20


def steady(spec: Declared, action: Action) -> Action:
    """Return `action` of a step as an action of a stream, far from its beginning."""
    per_step = spec.num_microbatches if action.kind.per_microbatch else updates_a_step(spec)
    return action._replace(index=action.index + STEADY * per_step)


def reaches(spec: Declared, action: Action, needs: Callable[[Action], Iterable[Action]]) -> list[tuple[int, Action]]:
    """Return the needs of `action` in the steps before its step: (steps earlier, action counted within that step).

    Args:
        needs: returns the needs of an action of the stream.
    """
    found = []
    for need in needs(steady(spec, action)):
        per_step = spec.num_microbatches if need.kind.per_microbatch else updates_a_step(spec)
        step, index = split_step(need.index, per_step)
        if step < STEADY:
            found.append((STEADY - step, need._replace(index=index)))
    return found


def period(spec: Declared) -> int:
    """Return the growth of slots from step to step."""
    first = next(iter(spec.actions(0, 0)))
    return spec.slot(first._replace(index=spec.num_microbatches)) - spec.slot(first)


def most_open(spec: Declared) -> int:
    """Return the most steps of a stream in progress at once, including one that is prefetched."""
    if spec.synchronous:
        return 2
    last = spec.num_microbatches - 1
    longest = max(
        spec.slot(spec.actions(stage, last)[-1]) - spec.slot(spec.actions(stage, 0)[0])
        for stage in range(spec.num_stages)
    )
    return longest // period(spec) + 2
