"""How many microbatches a worker may have to hold: in its own order, and at the worst timing there is.

The worst timing lets every F start that may, and finishes no B or W before nothing else can happen. As the
B and W of a shard (or of the whole worker) follow each other in a chain, the state of a worker is how far each
chain is, and the most that is held is found by counting, chain position by chain position.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .action import Action
from .spec import Spec

if TYPE_CHECKING:
    from .program import Entry

#: how much of a relation is searched that reaches its own releases only through other workers
_FAR_ACTIONS = 100_000


def peak_in_order(program: Iterable[Action]) -> int:
    """Return the most microbatches held from F to B (or W) if the program runs in its order."""
    held = peak = 0
    for action in program:
        held += action.kind.holds
        peak = max(peak, held)
    return peak


def peak_at_any_timing(spec: Spec, program: Sequence[Entry], enough: int) -> int:
    """Return a bound on what a worker holds at any timing; exact if the bound is above `enough`.

    First from the worker's own edges alone, which nearly always is enough; then, for the first microbatches,
    from the whole relation.
    """
    bound = _Bound(spec, program)
    near = bound.peak({})
    return near if near <= enough else min(near, bound.peak(bound.far_needs()))


class _Bound:
    def __init__(self, spec: Spec, program: Sequence[Entry]) -> None:
        self._spec = spec
        self._program = program
        releases = [entry for entry in program if entry.action.kind.accumulates]
        in_one_chain = all(b.action in a.own for b, a in itertools.pairwise(releases))
        #: release -> (its chain, its place in it from 1)
        self._place: dict[Action, tuple[tuple[int, int], int]] = {}
        length: Counter[tuple[int, int]] = Counter()
        for entry in releases:
            chain = (-1, -1) if in_one_chain else self._shard(entry.action)
            length[chain] += 1
            self._place[entry.action] = chain, length[chain]
        self._in_one_chain = in_one_chain

    def _shard(self, action: Action) -> tuple[int, int]:
        return action.stage, self._spec.route(action.microbatch)

    def peak(self, far: dict[Action, list[Action]]) -> int:
        """Return the sum over chains of the most F that may start less the releases they waited for."""
        needed: dict[Action, Counter[tuple[int, int]]] = {}
        started: dict[tuple[int, int], Counter[int]] = {}
        for entry in self._program:
            action = entry.action
            least: Counter[tuple[int, int]] = Counter()
            for need in (*entry.own, *far.get(action, ())):
                if need in self._place:
                    chain, place = self._place[need]
                    least[chain] = max(least[chain], place)
                elif need in needed:
                    least |= needed[need]
            needed[action] = least
            if action.kind.way == 1 and (not far or action in far):
                chain = (-1, -1) if self._in_one_chain else self._shard(action)
                started.setdefault(chain, Counter())[least[chain]] += 1
        return sum(_most_held(by_need) for by_need in started.values())

    def far_needs(self) -> dict[Action, list[Action]]:
        """Return, for the first F, the own releases that the relation reaches through other workers."""
        forwards = (entry.action for entry in self._program if entry.action.kind.way == 1)
        found: dict[Action, list[Action]] = {}
        searched = 0
        for action in forwards:
            if searched > _FAR_ACTIONS:
                break
            seen, stack, own = {action}, [action], []
            while stack:
                for need in self._spec.needs(stack.pop()):
                    if need in self._place:
                        own.append(need)
                    elif need not in seen:
                        seen.add(need)
                        stack.append(need)
            searched += len(seen)
            found[action] = own
        return found


def _most_held(by_need: Counter[int]) -> int:
    """Return the maximum over c of (F that need at most c releases) - c."""
    started = most = 0
    for releases in sorted(by_need):
        started += by_need[releases]
        most = max(most, started - releases)
    return most
