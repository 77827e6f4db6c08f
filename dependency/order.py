"""A worker's own actions in order, found without asking any other worker.

The order comes from the first of these that the spec gives: `slot` (sorted; lazily, if the stream is
endless), `program` (as listed), or the unrolled relation (`unroll.py`, a global pass).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import itemgetter

from .action import ACCUMULATING, Action, B, F, G, I, Kind, R, W
from .errors import ScheduleError
from .spec import ENDLESS, Spec
from .unroll import unroll

#: what may run once for every stage and microbatch
_PER_MICROBATCH = (F, R, B, I, W)


def has_slot(spec: Spec) -> bool:
    """Tell whether the order of `spec` is a closed form, so that every worker can check it alone."""
    return type(spec).slot is not Spec.slot


def has_program(spec: Spec) -> bool:
    """Tell whether `spec` lists each worker's actions itself."""
    return type(spec).program is not Spec.program


def local_order(spec: Spec, worker: int) -> Iterator[Action]:
    """Yield the actions of `worker` in its order, those that end a synchronous step included.

    Costs O(n log n) for n own actions, O(window) memory for an endless stream.

    Raises:
        ScheduleError: two actions of the worker share a slot.
    """
    if has_slot(spec):
        order = _by_slot(spec, worker)
    elif has_program(spec):
        order = iter(spec.program(worker))
    else:
        order = iter(_unrolled(spec)[worker])
    return _with_updates(spec, worker, order) if spec.synchronous else order


#: a global pass, of which each worker in this process wants a part
_unrolled = lru_cache(maxsize=4)(unroll)


def _by_slot(spec: Spec, worker: int) -> Iterator[Action]:
    slot, by_slot = spec.slot, itemgetter(0)
    streams = _own_streams(spec, worker)
    if spec.num_microbatches == ENDLESS:
        slotted: Iterable[tuple[int, Action]] = heapq.merge(*(_slotted(spec, s) for s in streams), key=by_slot)
    else:
        slotted = sorted([(slot(action), action) for stream in streams for action in stream], key=by_slot)
    last_slot, last_action = None, None
    for at, action in slotted:
        if at == last_slot:
            raise ScheduleError(
                f"slot: {last_action} and {action} of worker {worker} share slot {at}; "
                "the slots of one worker must differ"
            )
        yield action
        last_slot, last_action = at, action


def _slotted(spec: Spec, actions: Iterator[Action]) -> Iterator[tuple[int, Action]]:
    return ((spec.slot(action), action) for action in actions)


def _own_streams(spec: Spec, worker: int) -> list[Iterator[Action]]:
    """Return, for each shard and kind on `worker`, its actions by ascending microbatch."""

    def stream(kind: Kind, stage: int, route: int) -> Iterator[Action]:
        if spec.num_routes == 1 and kind in always:
            yield from (Action(stage, kind, m) for m in range(spec.num_microbatches))
            return
        for m in range(spec.num_microbatches):
            if spec.route(m) == route and (kind in always or kind in (a.kind for a in spec.actions(stage, m))):
                yield kind(stage, m)

    hosted = spec.hosted(worker)
    mixed = type(spec).splits is not Spec.splits
    kinds = {shard: _PER_MICROBATCH if mixed else [a.kind for a in spec.actions(shard[0], 0)] for shard in hosted}
    always = (F,) if mixed else _PER_MICROBATCH
    streams = [stream(kind, *shard) for shard in hosted for kind in kinds[shard]]
    if not spec.synchronous:
        streams += [iter(spec.updates(s, r)) for s, r in hosted]
    return streams


def _with_updates(spec: Spec, worker: int, order: Iterable[Action]) -> Iterator[Action]:
    """Put each update right behind the last action that it needs: a step's end is an edge, not a barrier.

    Of replicas the exchange of gradients stands there, and the updates, which wait for other workers, are last.
    """
    replicated = spec.num_routes > 1
    microbatches = Counter(map(spec.route, range(spec.num_microbatches)) if replicated else {0: spec.num_microbatches})
    left = {shard: microbatches[shard[1]] for shard in spec.hosted(worker)}
    ended = [shard for shard, count in left.items() if count == 0]
    yield from (G(*shard) for shard in ended)  # a route without microbatches
    for action in order:
        yield action
        if action.kind in ACCUMULATING:
            shard = action.stage, spec.route(action.microbatch) if replicated else 0
            left[shard] = left.get(shard, 0) - 1
            if left[shard] == 0:
                ended.append(shard)
                yield from [G(*shard)] if replicated else spec.updates(*shard)
    if replicated:
        yield from (update for shard in ended for update in spec.updates(*shard))
