"""Actions in time, the common form of simulations, traces and drawings; the cause of each wait; exact sums of times."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from ..dependency import Action, Spec


class Span(NamedTuple):
    """One action of one worker, from `start` to `end`, in any unit of time."""

    worker: int
    action: Action
    start: float
    end: float


class Wait(NamedTuple):
    """The idle time of a worker before an action, in the unit of the spans, and its cause."""

    time: float
    #: the dependency of the action that ended last; None: unknown
    cause: Span | None


def waits(spec: Spec, spans: Sequence[Span], *, slack: float = 0.0) -> dict[Span, Wait]:
    """Return the wait before every span that a gap precedes; other spans are not in the result.

    The gap runs from the end of the worker's action before, for a worker's first span from the first start
    of all. `spans` may hold several steps: a span is paired with the latest run of a need that ended at its start
    or earlier, or at most `slack` later: the error of the alignment of clocks, in the unit of the spans.
    """
    runs: defaultdict[Action, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.end):
        runs[span.action].append(span)
    ends = {action: [span.end for span in found] for action, found in runs.items()}

    def latest(action: Action, until: float) -> Span | None:
        at = bisect_right(ends.get(action, []), until)
        return runs[action][at - 1] if at else None

    found: dict[Span, Wait] = {}
    first = min((span.start for span in spans), default=0.0)
    free: defaultdict[int, float] = defaultdict(lambda: first)
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        gap = span.start - free[span.worker]
        if gap > 0:
            needs: Iterable[Action] = spec.needs(span.action)
            ended = [run for need in needs if (run := latest(need, span.start + slack)) is not None]
            found[span] = Wait(gap, max(ended, key=lambda s: s.end, default=None))
        free[span.worker] = max(free[span.worker], span.end)
    return found


def critical_path(spans: Sequence[Span], found: Mapping[Span, Wait]) -> list[Span]:
    """Return the actions that determine the last end, from first to last: each began when the one before was there.

    Before an action that waited stands the cause of its wait, before any other the worker's action just before.
    `found` is the result of `waits`.
    """
    before: dict[Span, Span] = {}
    latest: dict[int, Span] = {}
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        wait, own = found.get(span), latest.get(span.worker)
        source = own if wait is None else wait.cause
        if source is not None:
            before[span] = source
        if own is None or span.end >= own.end:
            latest[span.worker] = span
    path: dict[Span, None] = {}
    last = max(spans, key=lambda s: s.end, default=None)
    while last is not None and last not in path:  # causes form a circle where clocks differ by more than a step takes
        path[last] = None
        last = before.get(last)
    return [*path][::-1]


def most_held(spans: Sequence[Span], num_workers: int, spec: Spec | None) -> list[float]:
    """Return of each worker how many microbatches' activations it holds at most; without a spec they are whole."""
    # At equal times ends come before starts; an action without duration starts and ends in its turn.
    events: list[tuple[float, bool, int]] = []
    for turn, (_, action, start, end) in enumerate(spans):
        if holds := action.kind.keeps:
            events.append((start, True, turn) if holds > 0 else (end, end == start, turn))
    live, peak = [0.0] * num_workers, [0.0] * num_workers
    for _, _, turn in sorted(events):
        worker, action = spans[turn][:2]
        live[worker] += action.kind.keeps * (spec.size(action) if spec else 1)
        peak[worker] = max(peak[worker], live[worker])
    return [most / (spec.parts if spec else 1) for most in peak]


#: largest denominator of costs, and most ticks of a time
_FINEST, _MOST = 10**6, 2**53
#: more different costs than these are measured ones
_DIFFERENT = 1000


def ticks(values: Iterable[float]) -> tuple[int, dict[float, float]] | None:
    """Return how many ticks a unit of time has, and the ticks of each value; None if they have no common unit.

    The product of two decimal numbers is taken as a decimal number: 0.9099999999999999 is 0.91.
    """
    different = frozenset(values)
    return None if len(different) > _DIFFERENT else _ticks(different)


@lru_cache(16)  # a search for an order simulates the same costs hundreds of times
def _ticks(different: frozenset[float]) -> tuple[int, dict[float, float]] | None:
    if not all(abs(value) < _MOST for value in different):
        return None
    exact = {value: Fraction(value).limit_denominator(_FINEST) for value in different}
    scale = lcm(*(each.denominator for each in exact.values()))
    if any(abs(float(each) - value) > abs(value) * 2**-50 for value, each in exact.items()):
        return None
    if max(exact.values(), default=Fraction(0)) * scale > _MOST >> 20:
        return None
    return scale, {value: int(each * scale) for value, each in exact.items()}
