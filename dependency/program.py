"""A worker's program: its actions in order, each with what it waits for and where its payload goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .action import Action, F
from .order import local_order
from .spec import Spec


class Pulled(NamedTuple):
    """Something another worker finishes first."""

    action: Action
    worker: int
    #: True if its payload flows to this worker; False if only its being finished matters (an order edge)
    carries: bool


class Entry(NamedTuple):
    """One action of a worker with everything the worker needs to know about it."""

    action: Action
    #: own actions that must be finished first
    own: tuple[Action, ...]
    #: other workers' actions that must be finished first
    pulled: tuple[Pulled, ...]
    #: the worker that pulls the payload of this action; None if it stays here or there is none
    consumer: int | None


def entries(spec: Spec, worker: int, *, forward_only: bool = False) -> Iterator[Entry]:
    """Yield the program of `worker`, lazily; with `forward_only` that of an evaluation: `F` and data flow.

    One edge is added to the schedule's own: gradients of a shard are summed in slot order, so each waits
    for the one before it. The sum is then the same for any order of arrival, with no gradient set aside.

    Raises:
        ScheduleError: two actions of the worker share a slot.
    """
    last_summed: dict[tuple[int, int], Action] = {}
    for action in local_order(spec, worker):
        if forward_only and action.kind is not F:
            continue
        own: list[Action] = []
        pulled: list[Pulled] = []
        for need in spec.data(action) if forward_only else spec.needs(action):
            at = spec.worker(need)
            if at == worker:
                own.append(need)
            else:
                pulled.append(Pulled(need, at, _consumer(spec, need) == worker))
        if action.kind is spec.accumulates:
            shard = action.stage, spec.route(action.microbatch)
            if shard in last_summed and last_summed[shard] not in own:
                own.append(last_summed[shard])
            last_summed[shard] = action
        consumer = _consumer(spec, action)
        yield Entry(action, tuple(own), tuple(pulled), None if consumer == worker else consumer)


def _consumer(spec: Spec, action: Action) -> int | None:
    successor = spec.successor(action)
    return None if successor is None else spec.worker(successor)
