"""The search of `plan`: every schedule, every number of microbatches, every cut; exact, or with a gap that is told.

Loads without torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..dependency import F, U
from .candidates import Candidate, candidates
from .cut_search import CutFound, CutSearch
from .plan import Plan, tell_name
from .profile import Chain, Machines, Profile

#: (share of the work that is done, 0 to 1; the best time so far, in milliseconds)
Tell = Callable[[float, float], None]

#: share of the time that is spent on a first look at all
_LOOKING = 0.4


@dataclass(frozen=True)
class Question:
    """What is to be planned."""

    profile: Profile
    machines: Machines
    #: rows of a batch, and into how many microbatches it may be split
    batch: int
    microbatches: tuple[int, ...]
    recompute: bool = True
    #: names; all by default
    schedules: tuple[str, ...] | None = None
    #: how long to search; what is left then is told as a gap
    seconds: float = float("inf")

    def chain(self, num_microbatches: int) -> Chain:
        """Return the blocks with what they cost for one of so many microbatches."""
        profile = self.profile
        blocks = profile.at(self.batch / num_microbatches)
        return Chain(blocks, profile.per_stage, profile.ties, profile.per_step, profile.per_mib, profile.model)


@dataclass
class Answer:
    """What was found."""

    #: the best cut of each schedule that was priced and fits, fastest first
    plans: list[Plan] = field(default_factory=list)
    #: no step of this model on these workers can be faster, whatever the schedule
    lower_bound: float = 0
    #: no plan among all that were to be searched is faster
    searched_bound: float = 0
    #: what nothing else beats both in time and in memory, fastest first
    front: list[Plan] = field(default_factory=list)
    #: the plan that exceeds the limits of memory least, if none fits, and by how many bytes
    nearest: Plan | None = None
    excess: float = 0
    #: schedules of which nothing was priced, as they cannot be faster than this
    left_out: dict[str, float] = field(default_factory=dict)
    #: schedules of which nothing was found that fits
    unfit: list[str] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """By how much, relatively, the best plan may be slower than the best there is among all plans; 0: proven."""
        if not self.plans or not self.plans[0].predicted_ms:
            return 0
        return max(0.0, 1 - self.searched_bound / self.plans[0].predicted_ms)


def default_microbatches(num_workers: int, batch: int) -> tuple[int, ...]:
    """Return numbers of microbatches that are worth trying: workers times 1, 2, 4, 8, as far as there are rows."""
    wanted = [num_workers * times for times in (1, 2, 4, 8)]
    return tuple(sorted({count for count in wanted if count <= batch} or {batch}))


def search(question: Question, tell: Tell = lambda share, best: None, *, with_front: bool = False) -> Answer:
    """Return the best plans, fastest first, with a proof or a gap."""
    return _Search(question, tell, with_front).answer()


class _Search:
    def __init__(self, question: Question, tell: Tell, with_front: bool) -> None:
        self._question = question
        self._tell = tell
        self._with_front = with_front
        self._until = time.monotonic() + question.seconds
        self._chains = {count: question.chain(count) for count in question.microbatches}
        self._searches = self._list()
        self._turns = self._in_turns()

    def _list(self) -> list[tuple[Candidate, CutSearch]]:
        q = self._question
        most_stages = next(iter(self._chains.values())).num_blocks if self._chains else 0
        listed = candidates(
            q.machines.num_workers,
            q.microbatches,
            recompute=q.recompute,
            most_stages=most_stages,
            schedules=q.schedules,
        )
        searches = []
        for candidate in listed:
            chain = self._chains[candidate.num_microbatches]
            spec = candidate.spec(q.machines.num_workers)
            searches.append((candidate, CutSearch(spec, chain, q.machines)))
        return sorted(searches, key=lambda pair: pair[1].least)

    def _in_turns(self) -> list[int]:
        """Return the places of all in turns: the most promising of each schedule, then the next of each."""
        groups: dict[str, int] = {}
        turns = []
        for at, (candidate, _) in enumerate(self._searches):
            name = tell_name(candidate.schedule, candidate.parameters)
            groups[name] = turn = groups.get(name, 0) + 1
            turns.append((turn, at))
        return [at for _, at in sorted(turns)]

    def answer(self) -> Answer:
        answer = Answer()
        if not self._searches:
            return answer
        best, bound = self._best(None, self._until, 0, 0.7 if self._with_front else 1)
        answer.searched_bound = bound
        answer.lower_bound = min([bound, *(relaxed(chain, self._question.machines, count)
                                           for count, chain in self._chains.items())])  # fmt: skip
        if best is None:
            self._say_nearest(answer)
            return answer
        if self._with_front:
            self._trace_front(max(best[1].memory))
        self._collect(answer)
        return answer

    def _best(
        self, cap: float | None, until: float, begin: float, end: float
    ) -> tuple[tuple[Candidate, CutFound] | None, float]:
        """Return the best plan within `cap` bytes, and a time that no plan within it can beat."""
        best: tuple[Candidate, CutFound] | None = None
        total = len(self._searches)

        def report(done: float) -> None:
            self._tell(begin + (end - begin) * done / total, best[1].time if best else float("inf"))

        def is_late(until: float) -> bool:
            # That nothing fits must not be said because there was no time to look.
            return time.monotonic() > until and (best is not None or cap is not None)

        # Climbing takes twenty times as long as to look at a first cut: all are looked at before the first is climbed.
        looked: list[tuple[tuple[float, float], int]] = []
        soon = until if until == float("inf") else time.monotonic() + _LOOKING * (until - time.monotonic())
        for number, at in enumerate(self._turns):
            candidate, search = self._searches[at]
            report(number / 3)
            if search.least == float("inf") or (best is not None and search.least >= best[1].time):
                continue  # nothing fits, or nothing is faster
            rank = float("inf"), search.least
            if not is_late(soon):
                found = search.look_first(cap)
                rank = found.rank
                if found.excess <= 0 and (best is None or found.time < best[1].time):
                    best = candidate, found
            looked.append((rank, at))
        for number, (_, at) in enumerate(sorted(looked)):
            candidate, search = self._searches[at]
            report(total / 3 + number / 3)
            if is_late(until) or (best is not None and search.least >= best[1].time):
                continue
            found = search.climb(min(until, time.monotonic() + self._slice(until)), cap)
            if found.excess <= 0 and (best is None or found.time < best[1].time):
                best = candidate, found
        bound = best[1].time if best is not None else float("inf")
        for number, (candidate, search) in enumerate(self._searches):
            report(2 * total / 3 + number / 3)
            better, least = search.prove(best[1] if best else None, until, cap)
            bound = min(bound, least)
            if better is not None:
                best = candidate, better
        return best, min(bound, best[1].time if best else bound)

    @staticmethod
    def _slice(until: float) -> float:
        return until if until == float("inf") else max(0.05, (until - time.monotonic()) / 8)

    def _trace_front(self, memory: float) -> None:
        """Search below smaller and smaller limits of memory; what is found is kept by each search."""
        for number, share in enumerate((0.85, 0.7, 0.55, 0.4, 0.3, 0.2)):
            begin = 0.7 + 0.05 * number
            left = self._until - time.monotonic()
            until = time.monotonic() + min(left, max(1.0, self._question.seconds / 12))
            found, _ = self._best(memory * share, until, begin, begin + 0.05)
            if found is None:
                break

    def _collect(self, answer: Answer) -> None:
        plans, everything = [], []
        for candidate, search in self._searches:
            fitting = sorted(search.found(), key=lambda found: found.time)
            if fitting:
                plans.append((candidate, search, fitting[0]))
                everything += [(candidate, search, found) for found in fitting]
            elif search.was_priced or search.least == float("inf"):
                answer.unfit.append(candidate.schedule)
            else:
                name = candidate.schedule
                answer.left_out[name] = min(search.least, answer.left_out.get(name, float("inf")))
        plans.sort(key=lambda triple: (triple[2].time, max(triple[2].memory)))
        answer.plans = [_plan(*triple) for triple in plans]
        for plan in answer.plans:
            answer.left_out.pop(plan.schedule, None)
        known = {*answer.left_out, *(plan.schedule for plan in answer.plans)}
        answer.unfit = sorted(set(answer.unfit) - known)
        everything.sort(key=lambda triple: (triple[2].time, max(triple[2].memory)))
        least = float("inf")
        for candidate, search, found in everything:
            if max(found.memory) < least * (1 - 1e-3):
                least = max(found.memory)
                answer.front.append(_plan(candidate, search, found))

    def _say_nearest(self, answer: Answer) -> None:
        # All are looked at, however long that takes, before the nearest are climbed: what is said is the least of all.
        looked = [(search.look_first(), candidate, search) for candidate, search in self._searches]
        looked.sort(key=lambda each: each[0].rank)
        until = time.monotonic() + min(3.0, self._question.seconds / 4)
        nearest = looked[0]
        for _, candidate, search in looked:
            if time.monotonic() > until:
                break
            found = search.climb(min(until, time.monotonic() + 0.3))
            nearest = min(nearest, (found, candidate, search), key=lambda each: each[0].rank)
        answer.nearest, answer.excess = _plan(nearest[1], nearest[2], nearest[0]), nearest[0].excess


def _plan(candidate: Candidate, search: CutSearch, found: CutFound) -> Plan:
    return search.priced.plan(candidate.schedule, dict(candidate.parameters), found.ends, candidate.recompute)


def relaxed(chain: Chain, machines: Machines, num_microbatches: int) -> float:
    """Return a time that no step can beat, whatever the schedule, the cut and the order.

    All work must be done by somebody, updates too, and that of one microbatch is done in a row.
    """
    slows = [machines.slow(w) for w in range(machines.num_workers)]
    fastest, blocks = min(slows), chain.num_blocks
    once = chain.blocks_time(F, 0, blocks)
    # On the first stage that is a whole backward: the step does not end before its worker's part.
    back = chain.least_back(0, blocks)
    whole = once + chain.least_backward(0, blocks)
    work = num_microbatches * whole + chain.blocks_time(U, 0, blocks)
    return max((once + back) * fastest, work / sum(1 / slow for slow in slows)) + chain.per_step
