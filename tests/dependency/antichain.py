"""What a worker may hold at the worst timing, slowly and from the definition: what the checker must agree with."""

from __future__ import annotations

from rpc_pipe.dependency import Action, Spec, entries


def most_held(spec: Spec) -> list[int]:
    """Return, for each worker, the most lives of activations that overlap at some timing.

    A life from `begin` to `end` overlaps another unless one's end must be finished before the other begins. The largest
    set in which all overlap has as many lives as there are, less the most pairs (end, begin) of which the first must be
    finished before the second, no life in two pairs as the first nor as the second.
    """
    programs = [[e for e in entries(spec, w) if spec.orders(e.action)] for w in range(spec.num_workers)]
    needs = {
        e.action: {*(need for need in e.own if isinstance(need, Action)), *(p.action for p in e.pulled)}
        for program in programs
        for e in program
    }
    before: dict[Action, set[Action]] = {}

    def all_before(action: Action) -> set[Action]:
        stack = [action]
        while stack:
            missing = [need for need in needs[stack[-1]] if need not in before]
            if missing:
                assert len(stack) <= len(needs), "a cycle"
                stack += missing
            else:
                done = stack.pop()
                before[done] = needs[done].union(*(before[need] for need in needs[done]))
        return before[action]

    most = []
    for program in programs:
        own = [e.action for e in program]
        begins = [a for a in own if a.kind.holds > 0]
        ends = [a for a in own if a.kind.holds < 0]
        most.append(len(begins) - _pairs([[i for i, end in enumerate(ends) if end in all_before(b)] for b in begins]))
    return most


def _pairs(choices: list[list[int]]) -> int:
    """Return how many can get one of their choices, each given once (Kuhn's augmenting paths)."""
    given: dict[int, int] = {}

    def give(who: int, tried: set[int]) -> bool:
        for what in choices[who]:
            if what not in tried:
                tried.add(what)
                if what not in given or give(given[what], tried):
                    given[what] = who
                    return True
        return False

    return sum(give(who, set()) for who in range(len(choices)))
