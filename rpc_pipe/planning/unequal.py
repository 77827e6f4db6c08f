"""Unequal microbatches: their times from a profile, their order, and the choice of their rows. Loads without torch.

Short microbatches at the beginning and the end of a step fill and drain a pipeline quickly. The order costs no memory
and changes no schedule. It is part of a step's declaration, so sums have a defined order: every worker computes it from
the same sizes. DynaPipe (Jiang et al. 2024, arXiv:2311.10418, section 4) chooses the rows of microbatches by dynamic
programming over rows that are sorted by length, as `group_rows` does.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import Action, B, ConfigError, F, I, Kind, R, Spec, W
from ..model.sharding import cut
from ..system.files import read_json
from .profile import THOUSAND, Profile, from_json
from .relation import Relation
from .simulator import simulate

#: time of a kind relative to a forward's
_RELATIVE = {F: 1.0, B: 2.0, I: 1.0, W: 1.0, R: 1.0}
#: nominal seconds to simulate an action. A constant, not a measurement: all workers must search equally long
_SECONDS_PER_ACTION = 3e-6
#: share of a step's predicted time that the search for its order takes
SEARCH_SHARE = 0.005
_MOST_TRIALS = 200
#: bounds on the slowest microbatch that the choice of rows tries
_TRIED_BOUNDS = 24


def mountain(seconds: Sequence[float]) -> list[int]:
    """Return an order of microbatches with the longest in the middle.

    >>> [[5, 1, 4, 2, 3][m] for m in mountain([5, 1, 4, 2, 3])]
    [1, 3, 5, 4, 2]
    """
    by_length = _ascending(seconds)
    return by_length[::2] + by_length[1::2][::-1]


def _ascending(seconds: Sequence[float]) -> list[int]:
    return sorted(range(len(seconds)), key=lambda m: (seconds[m], m))


#: (action, number of its microbatch as given) -> its time relative to actions of its kind
Relative = Callable[[Action, int], float]


def balanced(spec: Spec, seconds: Sequence[float], step_s: float = 0, relative: Relative | None = None) -> list[int]:
    """Return the order of a step's microbatches that the schedule runs fastest, as far as a short search finds it.

    Equal microbatches stay as they are. Two routes of opposite directions need long microbatches at different places,
    so ascending times are tried, too.

    Args:
        spec: a schedule over whole sequences; its number of microbatches may be another one.
        seconds: predicted time of each microbatch, in any unit.
        step_s: predicted seconds of the step; the search takes `SEARCH_SHARE` of them. 0: no search behind `mountain`.
        relative: times that differ from stage to stage; None: `seconds` hold for all stages.
    """
    if len(set(seconds)) < 2:
        return list(range(len(seconds)))
    orders = [mountain(seconds)] + [_ascending(seconds)] * (spec.num_routes > 1)
    if len(orders) == 1 and not step_s:
        return orders[0]
    relation, numbers = _relation(replace(spec, num_microbatches=len(seconds))), random.Random(0)
    span = partial(span_of, relation, seconds, relative=relative)
    found, _, order = min((span(order), at, order) for at, order in enumerate(orders))
    trials = min(_MOST_TRIALS, int(SEARCH_SHARE * step_s / (len(relation.actions) * _SECONDS_PER_ACTION)))
    for _ in range(trials - 1):
        tried = list(order)
        taken, put = numbers.sample(range(len(tried)), 2)
        if numbers.random() < 0.5:
            tried[taken], tried[put] = tried[put], tried[taken]
        else:
            tried.insert(put, tried.pop(taken))
        if (took := span(tried)) < found:
            found, order = took, tried
    return order


def span_of(
    relation: Relation, seconds: Sequence[float], order: Sequence[int], relative: Relative | None = None
) -> float:
    """Return the simulated time of a step in a stream with this order of microbatches, in the unit of `seconds`."""
    time = relative or (lambda action, number: seconds[number])

    def cost(action: Action) -> float:
        once = _RELATIVE.get(action.kind, 0.0)
        return once * time(action, order[action.index % len(order)]) if action.kind.per_microbatch else 0.0

    return simulate(relation, list(map(cost, relation.actions))).span


_relation = lru_cache(8)(Relation)


def by_microbatch(
    spec: Spec, *, lengths: Sequence[float], order: str, relative: Relative | None = None
) -> tuple[list[float], Callable[[Action], float]]:
    """Return the lengths of microbatches in the order of the run, and the factor of an action's time by its microbatch.

    Args:
        lengths: of the microbatches of a step.
        relative: their times; None: as the lengths.
        order: one of `MICROBATCH_ORDERS`.

    Raises:
        ConfigError: there is not one length for each microbatch.
    """
    whole, count = spec.unsliced(), spec.num_whole
    if len(lengths) != count:
        raise ConfigError(f"lengths: has {len(lengths)} numbers for {count} microbatches; give one for each")
    numbers = balanced(whole, lengths, relative=relative) if order == "balanced" else range(count)
    time = relative or (lambda action, number: lengths[number])

    def factor(action: Action) -> float:
        return time(action, numbers[spec.whole_microbatch(action)]) if action.kind.per_microbatch else 1

    return [lengths[m] for m in numbers], factor


def group_rows(
    lengths: Sequence[int],
    seconds: Callable[[int, int], float],
    *,
    most_tokens: int,
    num_stages: int,
    least: int = 1,
    multiple: int = 1,
) -> list[list[int]]:
    """Return the rows of each microbatch, for the shortest step on a pipeline.

    A step takes about the sum of its microbatches' times, and `num_stages` - 1 times the longest one. Rows of similar
    length share a microbatch, which is padded to its longest row.

    Args:
        lengths: tokens of each row.
        seconds: (rows, length) -> predicted time of a microbatch.
        most_tokens: the most tokens of a microbatch, padding included: the limit of memory.
        least: the least number of microbatches.
        multiple: a divisor of their number, if there are rows enough.

    Raises:
        ConfigError: a row is longer than `most_tokens`.

    >>> group_rows([8, 2, 7, 2, 2, 2], lambda rows, length: 6 + rows * length, most_tokens=16, num_stages=2)
    [[0], [2], [1, 3, 4, 5]]
    """
    if lengths and max(lengths) > most_tokens:
        raise ConfigError(f"most_tokens={most_tokens}: the longest row has {max(lengths)} tokens; pass as many")
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    most_rows = max(1, math.ceil(len(rows) / least))
    times = []
    for begin, row in enumerate(rows):
        fit = min(len(rows) - begin, max(1, most_tokens // max(1, lengths[row])), most_rows)
        times.append([seconds(count, lengths[row]) for count in range(1, fit + 1)])
    candidates = sorted({time for each in times for time in each})
    # Below the longest single row no bound is possible.
    first = bisect_left(candidates, max((each[0] for each in times), default=0.0))
    candidates = candidates[first:]
    bounds = candidates[:: max(1, len(candidates) // _TRIED_BOUNDS)] + candidates[-1:]
    took, best = math.inf, list[int]()
    for total, sizes in (_shortest(times, bound) for bound in bounds):
        total += (num_stages - 1) * max((times[begin][size - 1] for begin, size in _begins(sizes)), default=0.0)
        if total < took:
            took, best = total, sizes
    groups = [rows[begin : begin + size] for begin, size in _begins(best)]
    while len(groups) % multiple and len(groups) < len(rows):
        widest = max(range(len(groups)), key=lambda number: len(groups[number]))
        half = len(groups[widest]) // 2
        groups[widest : widest + 1] = groups[widest][:half], groups[widest][half:]
    return [sorted(group) for group in groups]


def _begins(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _shortest(times: Sequence[Sequence[float]], bound: float) -> tuple[float, list[int]]:
    """Return the least sum of times of groups of consecutive rows, none above `bound`, and the groups' sizes."""
    ends: list[tuple[float, int]] = [(0.0, 0)]  # from the last row on: sum, size of the first group
    for begin in range(len(times) - 1, -1, -1):
        choices = [(time + ends[-size][0], size) for size, time in enumerate(times[begin], start=1) if time <= bound]
        ends.append(min(choices))
    sizes, place = [], len(times)
    while place:
        sizes.append(ends[place][1])
        place -= ends[place][1]
    return ends[-1][0], sizes


class LengthCost(NamedTuple):
    """Predicts seconds of a forward and a backward: fixed + token * tokens + attention * tokens * length."""

    fixed: float
    token: float
    attention: float

    def seconds(self, rows: int, length: int) -> float:
        """Return the time of a microbatch of `rows` rows that are padded to `length`."""
        return self.fixed + rows * length * (self.token + self.attention * length)

    @classmethod
    def of(cls, profile: Profile) -> LengthCost:
        """Return the cost of a whole model."""

        def total(name: str) -> float:
            return float(sum(getattr(block, name).get(kind, 0) for block in profile.by_length for kind in (F, B)))

        # From milliseconds and thousands.
        return cls(*(total(name) / THOUSAND ** (1 + power) for power, name in enumerate(cls._fields)))


def refuse_without(profile: Profile, where: str) -> None:
    """Raise ConfigError if a profile has no times by length."""
    if not profile.by_length or not profile.length:
        raise ConfigError(f"{where}: has no times by length; measure these by rpc-pipe profile --lengths 64,128,256")


def relative_times(profile: Profile, lengths: Sequence[float], num_stages: int) -> Relative:
    """Return the times of microbatches of one row each, relative to their mean, by stage and kind of an even cut."""
    stages = cut(profile.num_blocks, num_stages, None)

    @cache
    def times(stage: int, kind: Kind) -> list[float]:
        blocks = [profile.by_length[block] for block in stages[stage]]
        took = [sum(terms.ms(kind, 1, length) for terms in blocks) for length in lengths]
        return [each * len(took) / sum(took) for each in took] if sum(took) else [1.0] * len(took)

    def relative(action: Action, microbatch: int) -> float:
        return times(action.stage, action.kind)[microbatch]

    return relative


def read_cost(source: str | Path | Mapping[str, Any]) -> LengthCost:
    """Return the cost in a profile, or its file.

    Raises:
        ConfigError: it is neither, or has no times by length.
    """
    if not isinstance(source, (str, Path, Mapping)):
        raise ConfigError(f"microbatch_cost={source!r}: must be a function that returns seconds, or a profile's file")
    where = "microbatch_cost" if isinstance(source, Mapping) else f"microbatch_cost={str(source)!r}"
    return LengthCost.of(read_measured(source, where))


def read_measured(source: str | Path | Mapping[str, Any], where: str) -> Profile:
    """Return the profile in a mapping or a file, which must have times by length."""
    profile = from_json(source if isinstance(source, Mapping) else read_json(Path(source), where), where)
    refuse_without(profile, where)
    return profile
