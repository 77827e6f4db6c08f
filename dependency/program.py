"""A worker's program: its actions in order, each with what it waits for and where its payload goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .action import ACCUMULATING, Action, F
from .errors import ScheduleError
from .memory import peak_in_order
from .order import has_program, has_slot, local_order
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
    #: other workers that pull the payload of this action
    consumers: tuple[int, ...]


def entries(spec: Spec, worker: int, *, forward_only: bool = False) -> Iterator[Entry]:
    """Yield the program of `worker`, lazily; with `forward_only` that of an evaluation: `F` and data flow.

    Raises:
        ScheduleError: two actions of the worker share a slot, or its activation limit is too small.
    """
    edges = _OrderEdges(spec, worker)
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
                pulled.append(Pulled(need, at, worker in _consumers(spec, need)))
        if not forward_only:
            own += (need for need in edges.of(action) if need not in own)
        consumers = tuple(sorted(_consumers(spec, action) - {worker}))
        yield Entry(action, tuple(own), tuple(pulled), consumers)


def order_limit(spec: Spec, worker: int) -> int | None:
    """Return how many activations the worker's own order lets it hold: what is listed is also what may be held."""
    limit = spec.activation_limit(worker)
    if limit is None and has_program(spec) and not has_slot(spec):
        limit = peak_in_order(spec.program(worker))
    return limit


class _OrderEdges:
    """The edges that follow from a worker's own order, in addition to the schedule's.

    Gradients of a shard are summed in this order, so each B or W waits for the one before it: the sum is then
    the same for any order of arrival, with no gradient set aside. An activation limit L lets the k-th F wait for
    the (k-L)-th B or W of the worker; it points backwards in the order, so it cannot deadlock, as a counter would.
    """

    def __init__(self, spec: Spec, worker: int) -> None:
        self._spec = spec
        self._worker = worker
        self._limit = order_limit(spec, worker)
        self._num_forwards = 0
        self._releases: list[Action] = []  # only if there is a limit
        self._last_release: dict[tuple[int, int], Action] = {}

    def of(self, action: Action) -> list[Action]:
        """Return the edges of `action`, which is the next in the order."""
        stage, kind, microbatch = action
        if kind in ACCUMULATING:
            # With a limit the releases of the whole worker are one chain.
            shard = (stage, self._spec.route(microbatch)) if self._limit is None else (-1, -1)
            before = self._last_release.get(shard)
            self._last_release[shard] = action
            if self._limit is not None:
                self._releases.append(action)
            return [] if before is None else [before]
        if kind is not F or self._limit is None:
            return []
        k = self._num_forwards
        self._num_forwards += 1
        if k < self._limit:
            return []
        if k - self._limit >= len(self._releases):
            raise ScheduleError(
                f"activation_limit({self._worker}) is {self._limit}, but in its order worker {self._worker} holds "
                f"{k + 1 - len(self._releases)} microbatches when it starts {action}"
            )
        return [self._releases[k - self._limit]]


def _consumers(spec: Spec, action: Action) -> set[int]:
    return {spec.worker(successor) for successor in spec.successors(action)}
