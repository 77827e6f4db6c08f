"""The decisions of a worker: events in, instructions out. No thread, clock, tensor or socket.

    events                          instructions
    start()              ──┐   ┌──  Pull(1F3, from worker 0)
    arrived(1F3)         ──┤   ├──  Publish(2B0, for worker 1)
    finished(2B0)        ──┴───┴──  take() -> 2F1: run this now

The same object is carried by the simulator, the in-process carrier and the RPC carrier, so what is
simulated is what runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..dependency import Action, Entry, Kind, Order, Pulled


class Pull(NamedTuple):
    """Ask `worker` for what `action` makes, ahead of need; without `carries` only for its being finished."""

    action: Action
    worker: int
    carries: bool


class Publish(NamedTuple):
    """Put the payload of the finished `action` into the outbox; `worker` pulls it."""

    action: Action
    worker: int


Instruction = Pull | Publish


class Finished:
    """A set of actions that stays small: per stage and kind a low-water mark and what lies above it."""

    def __init__(self) -> None:
        self._low: dict[tuple[int, Kind], int] = {}
        self._above: dict[tuple[int, Kind], set[int]] = {}

    def add(self, action: Action) -> None:
        stage, kind, microbatch = action
        key = stage, kind
        low = self._low.get(key, 0)
        above = self._above.get(key)
        if microbatch != low:
            if above is None:
                above = self._above[key] = set()
            assert microbatch > low and microbatch not in above, f"{action} happened twice"
            above.add(microbatch)
            return
        low += 1
        while above and low in above:
            above.remove(low)
            low += 1
        self._low[key] = low

    def __contains__(self, action: Action) -> bool:
        stage, kind, microbatch = action
        key = stage, kind
        return microbatch < self._low.get(key, 0) or microbatch in self._above.get(key, ())


class WorkerState:
    """What one worker has done in a step, what it may do next, what it should ask for.

    Args:
        program: the worker's entries in slot order; read lazily, `lookahead` entries beyond the oldest
            unfinished one, so it may be endless.
        order: `fixed` runs the head of the program and waits for it; `ready` runs the first entry of the
            program whose needs have all been met.
        lookahead: how many entries may be known, and so pulled for, ahead of the oldest unfinished one; at
            least half as many always are.
    """

    def __init__(self, program: Iterable[Entry], order: Order, lookahead: int = 64) -> None:
        self.order = order
        self.running: Action | None = None
        self._program: Iterator[Entry] = iter(program)
        self._exhausted = False
        self._lookahead = lookahead
        self._entries: dict[int, Entry] = {}  # known and unfinished, by position, oldest first
        self._missing: dict[int, int] = {}  # position -> needs not met yet
        self._waiting: dict[Action, list[int]] = {}  # need -> positions that wait for it
        self._ready: list[int] = []  # heap of positions whose needs are met
        self._done = Finished()
        self._running_position = -1
        self._admitted = 0
        self._head = 0  # position of the next entry in fixed order

    def start(self) -> list[Instruction]:
        """Begin: return the first pulls."""
        instructions: list[Instruction] = []
        self._admit(instructions)
        return instructions

    def arrived(self, action: Action) -> list[Instruction]:
        """Note that a pulled action has arrived."""
        self._satisfy(action)
        return []

    def finished(self, action: Action) -> list[Instruction]:
        """Note that the running action is done; return what to publish and what to pull next."""
        assert action == self.running, f"finished {action} while running {self.running}"
        entry = self._entries.pop(self._running_position)
        self.running = None
        instructions: list[Instruction] = []
        instructions += [Publish(action, consumer) for consumer in entry.consumers]
        self._satisfy(action)
        self._admit(instructions)
        return instructions

    def take(self) -> Action | None:
        """Choose the next action and count it as running; None if none may run now."""
        if self.running is not None or not self._ready:
            return None
        if self.order == "fixed":
            if self._ready[0] != self._head:
                return None
            self._head += 1
        self._running_position = heapq.heappop(self._ready)
        self.running = self._entries[self._running_position].action
        return self.running

    @property
    def complete(self) -> bool:
        """True when every action of the program is finished."""
        return self._exhausted and not self._entries

    def blocked(self) -> tuple[Action, list[Pulled]] | None:
        """Return the oldest action that waits for other workers, and for what: the roll-call on a stall."""
        for entry in self._entries.values():
            missing = [need for need in entry.pulled if need.action not in self._done]
            if missing:
                return entry.action, missing
        return None

    def _satisfy(self, action: Action) -> None:
        self._done.add(action)
        for position in self._waiting.pop(action, ()):
            self._missing[position] -= 1
            if self._missing[position] == 0:
                del self._missing[position]
                heapq.heappush(self._ready, position)

    def _admit(self, instructions: list[Instruction]) -> None:
        oldest = next(iter(self._entries), self._admitted)
        if self._exhausted or self._admitted > oldest + self._lookahead // 2:
            return  # many at once, so that many questions go in one message
        while self._admitted < oldest + self._lookahead:
            entry = next(self._program, None)
            if entry is None:
                self._exhausted = True
                return
            position = self._admitted
            self._admitted += 1
            self._entries[position] = entry
            missing = 0
            for need in entry.own:
                if need not in self._done:
                    self._waiting.setdefault(need, []).append(position)
                    missing += 1
            for pulled in entry.pulled:
                if pulled.action in self._done:
                    continue
                if pulled.action not in self._waiting:
                    instructions.append(Pull(*pulled))
                self._waiting.setdefault(pulled.action, []).append(position)
                missing += 1
            if missing:
                self._missing[position] = missing
            else:
                heapq.heappush(self._ready, position)
