"""The decisions of a worker: events in, instructions out. No thread, clock, tensor or socket.

    events                          instructions
    start()              ──┐   ┌──  Pulled(1F3, from worker 0): ask for this
    arrived(1F3)         ──┼───┴──  take() -> the entry of 2F1: run this now; it says who is served
    finished(2B0)        ──┘

A worker has several resources, and runs one action on each at a time: copies beside compute, and what travels between
workers without either. The simulator evaluates the same tables for all workers at once.
"""

from __future__ import annotations

import heapq

from ..dependency import RESOURCES, Action, Entry, Order, Part, Pulled, Resource


class WorkerState:
    """What one worker has done in a step, what it may do next, what it should ask for.

    Args:
        part: what the worker has to do.
        order: `fixed` runs what is next in the order of each resource and waits for it; `ready` runs the first
            whose needs have all been met.
        before: the state of the step before, if that may still run: forwards wait for updates there.
    """

    def __init__(self, part: Part, order: Order, before: WorkerState | None = None) -> None:
        self.part = part
        #: by resource, what runs now
        self.running: dict[Resource, int] = {}
        self._fixed = order == "fixed"
        self._missing = part.num_needs.copy()
        self._left = len(part.entries)
        self._arrived: set[Action] = set()
        self._done = bytearray(len(part.entries))
        #: by resource, a heap of those whose needs are met, and the place of the next one in its queue
        self._ready: dict[Resource, list[int]] = {resource: [] for resource in RESOURCES}
        self._issued: dict[Resource, int] = dict.fromkeys(RESOURCES, 0)
        self._next: WorkerState | None = None
        #: own actions of the step before that are still to come
        self._inherited: set[Action] = set()
        if before is not None:
            before._next = self
            for action, numbers in part.inherited.items():
                if not before.has_finished(action):
                    self._inherited.add(action)
                    for number in numbers:
                        self._missing[number] += 1
        for number, missing in enumerate(self._missing):
            if not missing:
                self._ready[part.entries[number].action.kind.resource].append(number)  # ascending, so a heap

    def start(self) -> list[Pulled]:
        """Begin: return what to ask other workers for."""
        return self.part.pulls

    def arrived(self, action: Action) -> None:
        """Note that a pulled action has arrived."""
        assert action not in self._arrived, f"{action} arrived twice"
        self._arrived.add(action)
        self._satisfy(self.part.waiting[action])

    def finished(self, action: Action) -> None:
        """Note that a running action is done."""
        number = self.part.number[action]
        running = self.running.pop(action.kind.resource, None)
        assert running == number, f"finished {action}, which was not running"
        self._done[number] = 1
        self._left -= 1
        self._satisfy(self.part.waiting.get(action, ()))
        if self._next is not None:
            self._next._finished_before(action)

    def take(self, resource: Resource = "compute") -> Entry | None:
        """Choose the next action on `resource` and count it as running; None if none may run now."""
        ready = self._ready[resource]
        if not ready or resource in self.running:
            return None
        issued = self._issued[resource]
        if self._fixed and ready[0] != self.part.queues[resource][issued]:
            return None
        self._issued[resource] = issued + 1
        number = self.running[resource] = heapq.heappop(ready)
        return self.part.entries[number]

    @property
    def may_be_overtaken(self) -> bool:
        """Tell whether the step after this one may compute, as there is nothing to run here."""
        return not self._fixed or self._issued["compute"] == len(self.part.queues["compute"])

    def has_finished(self, action: Action) -> bool:
        """Tell whether an own action of this step is done."""
        return bool(self._done[self.part.number[action]])

    @property
    def complete(self) -> bool:
        """True when everything is finished."""
        return not self._left

    def blocked(self) -> tuple[Action, list[Pulled]] | None:
        """Return the first action that waits for other workers, and for what: the roll-call on a stall."""
        for number, entry in enumerate(self.part.entries):
            if not self._done[number]:
                missing = [need for need in entry.pulled if need.action not in self._arrived]
                if missing:
                    return entry.action, missing
        return None

    def _finished_before(self, action: Action) -> None:
        if action in self._inherited:
            self._inherited.remove(action)
            self._satisfy(self.part.inherited[action])

    def _satisfy(self, numbers: list[int] | tuple[()]) -> None:
        for number in numbers:
            self._missing[number] -= 1
            if not self._missing[number]:
                heapq.heappush(self._ready[self.part.entries[number].action.kind.resource], number)
