"""A worker's own actions in order, found without asking any other worker.

The order comes from the first of these that the spec gives: `slot` (sorted; lazily, if the stream is
endless), `program` (as listed), or the unrolled relation (`unroll.py`, a global pass).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from .action import Action
from .errors import ScheduleError
from .spec import ENDLESS, Spec
from .unroll import unroll


def has_slot(spec: Spec) -> bool:
    """Tell whether the order of `spec` is a closed form, so that every worker can check it alone."""
    return type(spec).slot is not Spec.slot


def has_program(spec: Spec) -> bool:
    """Tell whether `spec` lists each worker's actions itself."""
    return type(spec).program is not Spec.program


def local_order(spec: Spec, worker: int) -> Iterator[Action]:
    """Yield the actions of `worker` in its order, the updates of a synchronous schedule included.

    Costs O(n log n) for n own actions, O(window) memory for an endless stream.

    Raises:
        ScheduleError: two actions of the worker share a slot.
    """
    if has_slot(spec):
        order = _by_slot(spec, worker)
    elif has_program(spec):
        order = iter(spec.program(worker))
    else:
        order = iter(unroll(spec)[worker])
    return _with_updates(spec, worker, order) if spec.synchronous else order


def _by_slot(spec: Spec, worker: int) -> Iterator[Action]:
    streams = [_stream(spec, kind_actions) for kind_actions in own_streams(spec, worker)]
    if spec.num_microbatches == ENDLESS:
        slotted: Iterable[tuple[int, Action]] = heapq.merge(*streams, key=_slot_of)
    else:
        slotted = sorted((pair for stream in streams for pair in stream), key=_slot_of)
    last_slot, last_action = None, None
    for slot, action in slotted:
        if slot == last_slot:
            raise ScheduleError(
                f"slot: {last_action} and {action} of worker {worker} share slot {slot}; "
                "the slots of one worker must differ"
            )
        yield action
        last_slot, last_action = slot, action


def own_streams(spec: Spec, worker: int) -> list[Iterator[Action]]:
    """Return, for each shard and kind on `worker`, its actions by ascending microbatch."""

    def stream(stage: int, route: int, kind_index: int) -> Iterator[Action]:
        kind = spec.kinds[kind_index]
        return (kind(stage, m) for m in range(spec.num_microbatches) if spec.route(m) == route)

    streams = [stream(s, r, k) for s, r in spec.hosted(worker) for k in range(len(spec.kinds))]
    if not spec.synchronous:
        streams += [iter(spec.updates(s, r)) for s, r in spec.hosted(worker)]
    return streams


def _stream(spec: Spec, actions: Iterator[Action]) -> Iterator[tuple[int, Action]]:
    return ((spec.slot(action), action) for action in actions)


def _slot_of(pair: tuple[int, Action]) -> int:
    return pair[0]


def _with_updates(spec: Spec, worker: int, order: Iterable[Action]) -> Iterator[Action]:
    """Put each update right behind the last action that it needs: a step's end is an edge, not a barrier."""
    left = {
        (stage, route): sum(spec.route(m) == route for m in range(spec.num_microbatches))
        for stage, route in spec.hosted(worker)
    }
    for action in order:
        yield action
        if action.kind is spec.accumulates:
            shard = action.stage, spec.route(action.microbatch)
            left[shard] = left.get(shard, 0) - 1
            if left[shard] == 0:
                yield from spec.updates(*shard)
