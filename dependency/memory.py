"""The most microbatches that a worker may hold: in its order, and at the worst timing.

The activations of a microbatch live from the action that begins their life (F) to the one that ends it (B or W). Two
lives overlap at some timing unless one must end before the other may begin. So the most that can be held at once is the
size of the largest set of lives without such a pair. By Dilworth's theorem (1950; Fulkerson
1956) that is the number of beginnings minus the size of the largest matching between beginnings and ends that they
need. The matching grows by one beginning at a time, so it also gives the answer for fewer microbatches.

Gradients are summed in order, so the ends form few chains, and an action needs a number of ends of each chain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from .action import Action, Entry, Milestone
from .program import entries
from .spec import Spec

WINDOW = "A window is an edge: let after(F(s, m)) name the B or W of microbatch m - window"
UNSURE = ", as far as its own edges tell (of more than 200,000 actions no others are looked at)"
#: a relation with more actions is not examined as a whole
_WHOLE = 200_000

#: chain -> how many of its ends
Ends = Mapping[int, int]
Ran = tuple[bool, Action, Iterable[Action | Milestone]]


class Lives:
    """The lifetimes of activations on a worker: which must end before which may begin.

    Args:
        relation: (whether the worker runs it, action, its needs), each after its needs. With fewer needs more lives
            overlap: a part of the relation gives an upper bound, and the whole gives the exact number.
        what: "activations", or "weights" of stages.
        there: how many lives have begun before.
    """

    def __init__(self, relation: Iterable[Ran], what: str = "activations", there: int = 0) -> None:
        #: by number of first microbatches, the most of these that may be held at once
        self.most: list[int] = [there]
        self.own: list[tuple[Action, Ends]] = []  # beginnings and ends, with the ends that are finished by then
        self._needed: list[Ends] = []  # by beginning
        self._length: list[int] = []  # of each chain
        self._partner: list[list[int]] = []  # chain -> the beginnings that its first ends are paired with
        self._full: dict[int, int] = {}  # chain -> number of its ends that lead to no end without a partner
        needed: dict[Action | Milestone, Ends] = {}
        for own, action, needs in relation:
            ends = _united(needed.get(need) for need in needs)
            held = action.kind.holds if own and action.kind.moves == what else 0
            if held > 0:
                self._begin(ends)
            elif held < 0:
                ends = self._end(ends)
            if held:
                self.own.append((action, ends))
            needed[action] = ends

    def run_to_most(self) -> list[Action]:
        """Return, in a legal order, the worker's beginnings and ends that lead to the most held activations."""
        return [action for action, ends in self.own if all(n <= self._full.get(chain, 0) for chain, n in ends.items())]

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
        """Pair a beginning with an end that it needs; earlier pairs may have to change."""
        wanted_by: dict[
            int, tuple[int, int, int]
        ] = {}  # beginning -> (the beginning that wants its end, the end's chain and place)
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


def loaded(spec: Spec, program: Iterable[Action]) -> set[tuple[int, int]]:
    """Return (stage, route) of the shards without weights on the device until an action of the step loads these.

    Args:
        program: a worker's actions, in order.
    """
    moved = [action for action in program if action.kind.holds != action.kind.keeps]
    first = {(action.stage, spec.route(action.index)): action for action in reversed(moved)}
    return {shard for shard, action in first.items() if action.kind.holds > 0}


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

    First from a worker's edges alone, which nearly always is enough; then from the whole relation, unless that is
    too large.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._programs: dict[int, list[Entry]] = {}

    @cached_property
    def of_more(self) -> Memory:
        """The same with more microbatches, so that windows bind; with a multiple, which some schedules require.

        Raises:
            PipeError: the schedule cannot be made for that number.
        """
        number, num_stages = self.spec.num_microbatches, self.spec.num_stages
        enough = min(8 * (number + num_stages), max(2 * number, 8 * num_stages, 256))
        while number < enough:
            number *= 2
        return Memory(replace(self.spec, num_microbatches=number))

    def program(self, worker: int) -> list[Entry]:
        """Return the program of a worker without the end of a step."""
        if worker not in self._programs:
            self._programs[worker] = [e for e in entries(self.spec, worker) if self.spec.orders(e.action)]
        return self._programs[worker]

    def at_any_timing(
        self, worker: int, is_enough: Callable[[Lives], bool], what: str = "activations"
    ) -> tuple[Lives, bool]:
        """Return the lives on `worker` by its part alone if that `is_enough`, else by the whole relation.

        The second value is False if the whole is too large: the lives are then an upper bound.
        """
        program, there = self.program(worker), 0
        if what == "weights":
            there = len(self.spec.hosted(worker)) - len(loaded(self.spec, (entry.action for entry in program)))
        lives = Lives(((True, entry.action, entry.own) for entry in program), what, there)
        if is_enough(lives) or self.spec.num_workers == 1:
            return lives, True
        if len(program) * self.spec.num_workers > _WHOLE:
            return lives, False
        return Lives(self._whole(worker), what, there), True

    def _whole(self, own: int) -> Iterator[tuple[bool, Action, list[Action]]]:
        """Yield the actions of all workers, each after its needs: a run of all of them in their orders."""
        programs = {worker: deque(self.program(worker)) for worker in self.spec.workers}
        done: set[Action] = set()
        moved = True
        while moved:
            moved = False
            for worker, program in programs.items():
                while program:
                    action, within, pulled, *_ = program[0]
                    all_needs = *within, *(p.action for p in pulled)
                    needs = [need for need in all_needs if isinstance(need, Action) and self.spec.orders(need)]
                    if not done.issuperset(needs):
                        break
                    yield worker == own, action, needs
                    done.add(action)
                    program.popleft()
                    moved = True
