"""The decisions of a worker: events in, instructions out. No thread, clock, tensor or socket.

    events                          instructions
    arrived(1F3)         ──┬──  take() -> the entry of 2F1: run this now; it lists its consumers
    reached(2B0, 3)      ──┤
    finished(2B0)        ──┘

A worker has several resources and runs one action at a time on each: compute, copies beside it, and messages between
workers, which need neither. The simulator evaluates the same tables for all workers at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..dependency import RESOURCES, Action, Entry, Milestone, Order, Part, Pulled, Resource


class WorkerState:
    """The finished, ready and awaited actions of one worker in a step.

    Args:
        part: the actions of the worker.
        order: `fixed` waits for the next action in the order of each resource; `ready` runs the first action with
            all its needs met.
        before: the states of earlier steps that may still run, the latest first; this step waits for actions of them.
        apart: whether the next step waits for the end of this one, so that all members of a worker make the same
            collectives before a step's result is known.
        awaits_inputs: whether forwards wait for parts of the batch from another worker.
    """

    def __init__(
        self,
        part: Part,
        order: Order,
        before: Sequence[WorkerState] = (),
        *,
        apart: bool = False,
        awaits_inputs: bool = False,
    ) -> None:
        self.part = part
        #: by resource, the running action
        self.running: dict[Resource, int] = {}
        self._fixed, self._apart = order == "fixed", apart
        self._missing = part.num_needs.copy()
        #: how many actions are not finished
        self.left = len(part.entries)
        self._arrived: set[Action] = set()
        self._reached: set[Milestone] = set()
        self._done = bytearray(len(part.entries))
        #: all actions before this number are done
        self._first_left = 0
        #: by resource, a heap of ready actions, and the place of the next one in its queue
        self._ready: dict[Resource, list[int]] = {resource: [] for resource in RESOURCES}
        #: heaps of actions that run beside compute
        self.controls, self.links, self.copies = (self._ready[each] for each in ("control", "link", "copy"))
        self._issued: dict[Resource, int] = dict.fromkeys(RESOURCES, 0)
        #: the states of later steps, with their actions that wait for actions of this one
        self._followers: list[tuple[WorkerState, dict[Action, list[int]]]] = []
        for earlier, inherited in zip(before, part.inherited, strict=False):
            missing_there = {a: numbers for a, numbers in inherited.items() if not earlier.has_finished(a)}
            if missing_there:
                earlier._followers.append((self, missing_there))
            for numbers in missing_there.values():
                for number in numbers:
                    self._missing[number] += 1
        for number in self._forwards() if awaits_inputs else ():
            self._missing[number] += 1
        for number, missing in enumerate(self._missing):
            if not missing:
                self._ready[part.resources[number]].append(number)  # ascending, so a heap

    def arrived(self, action: Action) -> None:
        """Note that a pulled action has arrived."""
        assert action not in self._arrived, f"{action} arrived twice"
        self._arrived.add(action)
        self._satisfy(self.part.waiting[action])

    def inputs_arrived(self) -> None:
        """Note that all awaited parts of the batch have arrived."""
        self._satisfy(self._forwards())

    def finished(self, action: Action) -> None:
        """Note that a running action is done."""
        number = self.part.number[action]
        running = self.running.pop(action.kind.resource, None)
        assert running == number, f"finished {action}, which was not running"
        self._done[number] = 1
        self.left -= 1
        if waits := self.part.waiting.get(action):
            self._satisfy(waits)
        for milestone in self.part.milestones.get(action, ()):
            self.reached(milestone)
        for follower, waiting in self._followers:
            if action in waiting:
                follower._satisfy(waiting[action])

    def reached(self, milestone: Milestone) -> None:
        """Note that an action has reached a milestone, perhaps again; one that nothing needs is passed over."""
        if milestone in self.part.waiting and milestone not in self._reached:
            self._reached.add(milestone)
            self._satisfy(self.part.waiting[milestone])

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
    def next_slot(self) -> int | None:
        """The slot of the action that `take` would choose to compute, or waits for; None: there is none."""
        if "compute" in self.running:
            return None
        if not self._fixed:
            ready = self._ready["compute"]
            return self.part.slots[ready[0]] if ready else None
        queue, issued = self.part.queues["compute"], self._issued["compute"]
        return self.part.slots[queue[issued]] if issued < len(queue) else None

    @property
    def may_be_overtaken(self) -> bool:
        """Return whether the next step may compute now, because this one has nothing to run."""
        return not self._apart and (not self._fixed or self._issued["compute"] == len(self.part.queues["compute"]))

    def has_finished(self, action: Action) -> bool:
        """Return whether an action of this worker in this step is done, or does not belong to this step."""
        number = self.part.number.get(action)
        return number is None or bool(self._done[number])

    def blocked(self) -> tuple[Action, list[Pulled]] | None:
        """Return the first action that waits for other workers, and its missing needs; a stall's report shows it."""
        done, entries = self._done, self.part.entries
        first = done.find(0, self._first_left)
        if first < 0:
            return None
        self._first_left = first
        for number in range(first, len(entries)):
            if not done[number]:
                entry = entries[number]
                missing = [need for need in entry.pulled if need.action not in self._arrived]
                if missing:
                    return entry.action, missing
        return None

    def _forwards(self) -> list[int]:
        return [number for number, entry in enumerate(self.part.entries) if entry.action.kind.way == 1]

    def _satisfy(self, numbers: list[int]) -> None:
        missing = self._missing
        for number in numbers:
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(self._ready[self.part.resources[number]], number)
