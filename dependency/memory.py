"""The most microbatches that a worker may hold: in its own order, and at the worst timing.

The activations of a microbatch live from the action that begins their life (F) to the one that ends it (B or W). Two
lives overlap at some timing unless one must end before the other may begin. So the most that can be held at once is the
size of the largest set of lives of which none must end before another begins. By Dilworth's theorem (1950; Fulkerson
1956) that is the number of beginnings minus the size of the largest matching between beginnings and ends that they
need. The matching grows by one beginning at a time, so it also gives the answer for fewer microbatches.

Gradients are summed in order, so the ends form few chains, and what an action needs is a number of ends of each chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from .action import Action, Entry
from .errors import ScheduleError
from .spec import Spec

#: a relation with more actions is not examined as a whole
_WHOLE = 200_000
#: the most actions that are followed to find how a beginning needs an end through other workers
_PATH = 20_000

#: chain -> how many of its ends
Ends = Mapping[int, int]


def peaks_in_order(program: Iterable[Action]) -> list[int]:
    """Return the most microbatches held from F to B (or W) in the program's order, by how many have begun."""
    held, peaks = 0, [0]
    for action in program:
        held += action.kind.holds
        if action.kind.holds > 0:
            peaks.append(max(peaks[-1], held))
    return peaks


class Lives:
    """The lifetimes of activations on a worker: which must end before which may begin.

    Args:
        relation: (whether it is the worker's own, action, what it needs), each after what it needs. If needs are left
            out, more lives overlap: a part of the relation gives an upper bound, and the whole gives the exact number.
    """

    def __init__(self, relation: Iterable[tuple[bool, Action, Iterable[Action]]]) -> None:
        #: by number of first microbatches, the most of these that may be held at once
        self.most: list[int] = [0]
        self._own: list[tuple[Action, Ends]] = []  # beginnings and ends, with the ends that are finished by then
        self._needed: list[Ends] = []  # by beginning
        self._length: list[int] = []  # of each chain
        self._partner: list[list[int]] = []  # chain -> the beginnings that its first ends are paired with
        self._full: dict[int, int] = {}  # chain -> how many of its ends lead to no end without a partner
        needed: dict[Action, Ends] = {}
        for own, action, needs in relation:
            ends = _united(needed.get(need) for need in needs)
            held = action.kind.holds if own else 0
            if held > 0:
                self._begin(ends)
            elif held < 0:
                ends = self._end(ends)
            if held:
                self._own.append((action, ends))
            needed[action] = ends

    def run_to_most(self) -> list[Action]:
        """Return, in a legal order, own beginnings and ends that lead to the most held activations."""
        return [action for action, ends in self._own if all(n <= self._full.get(chain, 0) for chain, n in ends.items())]

    def _end(self, ends: Ends) -> Ends:
        at = next((chain for chain, n in ends.items() if n == self._length[chain]), len(self._length))
        if at == len(self._length):
            self._length.append(0)
            self._partner.append([])
        self._length[at] += 1
        return {**ends, at: self._length[at]}

    def _begin(self, ends: Ends) -> None:
        self._needed.append(ends)
        self.most.append(self.most[-1] + (not self._pair(len(self._needed) - 1)))

    def _pair(self, beginning: int) -> bool:
        """Pair a beginning with an end that it needs; those paired before may have to change to others."""
        wanted_by: dict[int, tuple[int, int, int]] = {}  # beginning -> (who wants its end, the end's chain and place)
        reached: dict[int, int] = {}
        asked = [beginning]
        for each in asked:
            for at, count in self._needed[each].items():
                partners = self._partner[at]
                if count > len(partners):
                    partners.append(each)
                    while each in wanted_by:
                        each, at, place = wanted_by[each]
                        self._partner[at][place] = each
                    return True
                before = reached.get(at, self._full.get(at, 0))
                for place in range(before, count):
                    wanted_by[partners[place]] = each, at, place
                    asked.append(partners[place])
                reached[at] = max(before, count)
        self._full.update(reached)
        return False


def _united(all_ends: Iterable[Ends | None]) -> Ends:
    """Return, for each chain, the most ends."""
    united: Ends = {}
    for ends in all_ends:
        if not united:
            united = ends or united
        elif ends and ends is not united:
            more = {at: n for at, n in ends.items() if n > united.get(at, 0)}
            if more:
                united = {**united, **more}
    return united


class Memory:
    """The most that the workers of a spec may hold at the worst timing.

    First from a worker's own edges alone, which nearly always is enough; then together with those workers whose edges
    lead from its beginnings to its ends, while all others only pass payloads on; then from the whole relation, unless
    that is too large.
    """

    def __init__(self, spec: Spec, compile: Callable[[Spec, int], Iterable[Entry]]) -> None:
        self.spec = spec
        self._compile = compile
        self._programs: dict[int, list[Entry]] = {}

    @cached_property
    def of_more(self) -> Memory:
        """The same of so many more microbatches that windows bind; of a multiple, which some schedules ask for.

        Raises:
            PipeError: the schedule cannot be made for so many.
        """
        number, num_stages = self.spec.num_microbatches, self.spec.num_stages
        enough = min(8 * (number + num_stages), max(2 * number, 8 * num_stages, 256))
        while number < enough:
            number *= 2
        return Memory(replace(self.spec, num_microbatches=number), self._compile)

    def program(self, worker: int) -> list[Entry]:
        """Return the program of a worker without what ends a step."""
        program = self._programs.get(worker)
        if program is None:
            program = [entry for entry in self._compile(self.spec, worker) if self.spec.orders(entry.action)]
            if not self._is_small(program):
                self._programs.clear()
            self._programs[worker] = program
        return program

    def _is_small(self, program: Sequence[Entry]) -> bool:
        return len(program) * self.spec.num_workers <= _WHOLE

    def at_any_timing(self, worker: int, is_enough: Callable[[Lives], bool]) -> tuple[Lives, bool]:
        """Return the lives on `worker`, apart as far as is enough or can be seen, and whether nothing was left out."""
        program = self.program(worker)
        lives = Lives((True, entry.action, entry.own) for entry in program)
        if is_enough(lives) or self.spec.num_workers == 1:
            return lives, True
        leading = self._leading(worker, program)
        if leading:
            lives = Lives(self._together(worker, {worker, *leading}))
            if is_enough(lives):
                return lives, True
        if self._is_small(program):
            return Lives(self._together(worker, set(range(self.spec.num_workers)))), True
        return lives, False

    def _together(self, own: int, workers: Collection[int]) -> Iterator[tuple[bool, Action, list[Action]]]:
        """Yield what `workers` run, each action after what it needs: a run of all of them in their orders.

        Raises:
            ScheduleError: they cannot be run so.
        """
        programs = {worker: self.program(worker) for worker in workers}
        listed = {entry.action for program in programs.values() for entry in program}
        stages = sorted({action.stage for action in listed})
        done: set[Action] = set()
        at = dict.fromkeys(programs, 0)
        moved = True
        while moved:
            moved = False
            for worker, program in programs.items():
                while at[worker] < len(program):
                    entry = program[at[worker]]
                    needs = [*entry.own]
                    for pulled in entry.pulled:
                        needs += self._passed_on(pulled.action, workers, stages)
                    if any(need not in done and need in listed for need in needs):
                        break
                    yield worker == own, entry.action, needs
                    done.add(entry.action)
                    at[worker] += 1
                    moved = True
        stuck = [str(program[at[worker]].action) for worker, program in programs.items() if at[worker] < len(program)]
        if stuck:
            raise ScheduleError(f"{', '.join(stuck)} can never be run: each waits for another")

    def _passed_on(self, need: Action, workers: Collection[int], stages: Sequence[int]) -> list[Action]:
        """Return what of `workers` a need follows from by data flow, or itself if one of them runs it."""
        spec, (stage, kind, microbatch) = self.spec, need
        if spec.worker(need) in workers:
            return [need]
        behind = sorted((s for s in stages if s * kind.way < stage * kind.way), key=lambda s: abs(s - stage))
        sources = (a for s in behind for a in spec.actions(s, microbatch) if a.kind.way == kind.way)
        passed_on = next((action for action in sources if spec.worker(action) in workers), None)
        if passed_on is not None:
            return [passed_on]
        before = spec.actions(stage, microbatch)
        before = before[: before.index(need)] if need in before else ()
        return self._passed_on(before[-1], workers, stages) if before else []

    def _leading(self, worker: int, program: Sequence[Entry]) -> set[int]:
        """Return the workers whose edges lead from a few beginnings to own ends that own edges do not lead to."""
        own = {entry.action: entry for entry in program}
        beginnings = [action for action in own if action.kind.holds > 0]
        leading: set[int] = set()
        for beginning in {beginnings[len(beginnings) * part // 4] for part in (1, 2, 3)}:
            near, asked = {beginning}, [beginning]
            for action in asked:
                new = [need for need in own[action].own if need in own and need not in near]
                near.update(new)
                asked += new
            leading |= self._leading_from(beginning, worker, near)
        return leading - {worker}

    def _leading_from(self, beginning: Action, worker: int, near: Collection[Action]) -> set[int]:
        spec = self.spec
        needed_by: dict[Action, Action] = {}
        asked = [(-beginning.index, 0, beginning)]  # the latest microbatch first: its ends are what windows name
        leading: set[int] = set()
        stages = {stage for stage, _ in spec.hosted(worker)}  # to whose ends no way has been found
        while asked and stages and len(needed_by) < _PATH:
            action = heapq.heappop(asked)[-1]
            if (
                action.kind.holds < 0
                and action.stage in stages
                and action not in near
                and spec.worker(action) == worker
            ):
                stages.remove(action.stage)
                leading.update(self._leading_back(action, beginning, needed_by))
                continue
            for need in spec.needs(action):
                if need not in needed_by:
                    needed_by[need] = action
                    heapq.heappush(asked, (-need.index, len(needed_by), need))
        return leading

    def _leading_back(self, action: Action, beginning: Action, needed_by: Mapping[Action, Action]) -> Iterator[int]:
        """Yield the workers whose own edges, and not the flow of data, lead from `beginning` to `action`."""
        while action != beginning:
            by = needed_by[action]
            if action not in self.spec.data(by):
                yield self.spec.worker(by)
            action = by
