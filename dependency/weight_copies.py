"""The age of gradients, and the versions of weights that an asynchronous stream holds, for its readers."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise

from .declared import Declared
from .earlier_steps import STEADY
from .reductions import on_route
from .versions import updates_before


def staleness(spec: Declared, stage: int) -> int:
    """Return the most updates of a stage between the weights of a gradient and the gradient's update."""
    if spec.synchronous:
        return 0
    first = STEADY * spec.num_microbatches
    own = range(first, first + spec.num_microbatches)
    return max(updates_before(spec, m) - spec.version(stage, m) for m in own)


def weight_copies(spec: Declared, stage: int) -> int:
    """Return how many versions of a stage's weights, of each route, are held at once at most, at any timing.

    A version is held while a microbatch before its backward uses it, or while it is the newest. Backwards of a route
    add up in order, so before the backward of a microbatch only updates that need no later one can have been made.
    """
    if spec.synchronous:
        return 1
    most, begin = 1, STEADY * spec.num_microbatches
    end = begin + spec.num_microbatches + (max(staleness(spec, stage), 0) + 2) * spec.round_size
    for route in range(spec.num_routes):
        uses = [*on_route(spec, range(begin, end), route)]
        versions = [spec.version(stage, m) for m in uses]
        different = [0, *accumulate(a != b for a, b in pairwise(versions))]
        for at, m in enumerate(uses):
            if m >= begin + spec.num_microbatches:
                break
            newest = updates_before(spec, m)
            last = bisect_right(versions, newest) - 1
            used = different[last] - different[at] + 1 if last >= at else 0
            most = max(most, used + (last < at or versions[last] != newest))
    return most


def worker_staleness(spec: Declared, worker: int) -> int:
    """Return the largest staleness of a worker's stages, in updates."""
    return max((staleness(spec, stage) for stage, _ in spec.hosted(worker)), default=0)


def worker_weight_copies(spec: Declared, worker: int) -> int:
    """Return the copies of weights on a worker, in shares of 1/P of the model: replicas, versions and a reference."""
    held = sum(
        weight_copies(spec, stage) + (route == 0 and spec.averaging_pull > 0) for stage, route in spec.hosted(worker)
    )
    return -(-held * spec.num_workers // spec.num_stages)
