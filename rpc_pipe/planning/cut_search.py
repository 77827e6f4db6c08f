"""The cut that makes a schedule's step shortest, as the simulator prices it, within the workers' memory.

First a cut whose slowest stage is as fast as can be, then moves of one boundary at a time, then proof: beginnings of
cuts are put off by the bound of what they can lead to, and what cannot beat the best known is never priced. It is not
enough to keep one best cut of each beginning, since a step's time depends on which stage turns out to be the slowest
(so Oobleck's planner says too). Loads without torch.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..dependency import B, F, I, R, Spec, U, W
from .bottleneck import Ends, least_bottleneck
from .bounds import Bounds
from .pricing import Priced
from .profile import Chain, Machines

#: a bound this much below the best known, relatively, may still be as good: sums in another order differ
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CutFound:
    """A cut with what the simulator says of it."""

    ends: Ends
    time: float
    #: bytes by worker
    memory: tuple[float, ...]
    #: by how many bytes it does not fit
    excess: float = 0

    @property
    def rank(self) -> tuple[float, float]:
        """What fits comes first, and then what is faster."""
        return self.excess, self.time


class CutSearch:
    """The search for the best cut with one schedule. What has been priced is remembered."""

    def __init__(self, spec: Spec, chain: Chain, machines: Machines) -> None:
        self.spec, self.chain, self.machines = spec, chain, machines
        self.bounds = Bounds(spec, chain, machines)
        self.least = self.bounds.everywhere()
        self._priced: Priced | None = None
        self._known: dict[Ends, tuple[float, tuple[float, ...] | None]] = {}

    @property
    def priced(self) -> Priced:
        """The compiled relation; made when it is needed first."""
        if self._priced is None:
            self._priced = Priced(self.spec, self.chain, self.machines)
        return self._priced

    def look(self, ends: Ends, *, faster_than: float = float("inf"), cap: float | None = None) -> CutFound | None:
        """Price a cut; None if it is not faster than what is wanted."""
        known = self._known.get(ends)
        if known is None or (known[1] is None and known[0] < faster_than):
            simulation = self.priced.simulate(ends)
            took = self.priced.step(simulation, ends)
            held = self.priced.memory(simulation, ends) if took < faster_than else None
            known = self._known[ends] = took, held
        if known[0] >= faster_than or known[1] is None:
            return None
        return CutFound(ends, known[0], known[1], self.priced.excess(known[1], cap))

    @property
    def was_priced(self) -> bool:
        """Whether any cut was."""
        return bool(self._known)

    def found(self) -> Iterator[CutFound]:
        """Yield what has been priced with its memory and fits."""
        for ends, (took, held) in self._known.items():
            if held is not None and self.priced.excess(held) <= 0:
                yield CutFound(ends, took, held)

    # --- a good cut, quickly

    def start(self, cap: float | None = None, *, roomy: bool = False) -> Ends:
        """Return a cut whose slowest stage is as fast as can be; within memory, as far as a stage can tell.

        Args:
            roomy: with room for a payload that comes and one that goes, and for what kernels need.
        """
        spec, chain = self.spec, self.chain
        count, depth = spec.num_microbatches, spec.num_stages
        slow = [min(self.machines.slow(spec.place(s, r)) for r in range(spec.num_routes)) for s in range(depth)]
        split = [spec.splits(s, 0) for s in range(depth)]
        again = [spec.recomputes(s) for s in range(depth)]
        shares = [sum(len(spec.hosted(spec.place(s, r))) for r in range(1)) for s in range(depth)]

        def load(stage: int, a: int, b: int) -> float:
            backward = chain.time(I, a, b) + chain.time(W, a, b) if split[stage] else chain.time(B, a, b)
            once = chain.time(F, a, b) + backward + (chain.time(R, a, b) if again[stage] else 0)
            return slow[stage] * (count * once + chain.time(U, a, b))

        limits = [self.machines.limit(spec.place(s, 0)) for s in range(depth)]
        limits = [cap if limit is None else limit if cap is None else min(cap, limit) for limit in limits]
        held = [spec.peak_activations(spec.place(s, 0)) or count for s in range(depth)]

        def fits(stage: int, a: int, b: int) -> bool:
            limit = limits[stage]
            if limit is None:
                return True
            size = chain.size(a, b)
            kept = size.inputs if again[stage] else size.activations
            room = roomy * (size.inputs + size.outputs + size.working)
            return size.shard + held[stage] / shares[stage] * kept + room <= limit / shares[stage]

        blocks = chain.num_blocks
        found = least_bottleneck(blocks, depth, load, fits) or least_bottleneck(blocks, depth, load)
        assert found is not None
        return found

    def _look_at(self, ends: Ends, cap: float | None) -> CutFound:
        found = self.look(ends, cap=cap)
        assert found is not None
        return found

    def look_first(self, cap: float | None = None) -> CutFound:
        """Return the first cut that is priced."""
        best = self._look_at(self.start(cap), cap)
        if best.excess > 0:
            best = min(best, self._look_at(self.start(cap, roomy=True), cap), key=lambda found: found.rank)
        return best

    def climb(self, until: float, cap: float | None = None) -> CutFound:
        """Return the best cut that moves of one boundary lead to from the first; `until`: by `time.monotonic`."""
        best = self.look_first(cap)
        step = max(1, self.chain.num_blocks // (4 * self.spec.num_stages))
        while step:
            better: CutFound | None = best
            while better is not None and time.monotonic() < until:
                best = better
                better = self._better(best, step, until, cap)
            step //= 2
        return best

    def _better(self, best: CutFound, step: int, until: float, cap: float | None) -> CutFound | None:
        for i in range(1, len(best.ends) - 1):
            for by in (step, -step):
                moved = (*best.ends[:i], best.ends[i] + by, *best.ends[i + 1 :])
                if moved[i - 1] < moved[i] < moved[i + 1]:
                    # What does not fit yet may become slower on its way to fit.
                    faster_than = float("inf") if best.excess > 0 else best.time
                    if self.bounds.of(moved) * (1 - _ROUNDING) >= faster_than:
                        continue
                    found = self.look(moved, faster_than=faster_than, cap=cap)
                    if found is not None and found.rank < best.rank:
                        return found
                if time.monotonic() > until:
                    return None
        return None

    # --- the best cut

    def prove(
        self, best: CutFound | None, until: float = float("inf"), cap: float | None = None
    ) -> tuple[CutFound | None, float]:
        """Search all cuts that may be faster than `best`.

        Args:
            best: the best that is known and fits, of any schedule.
            until: when to stop, by `time.monotonic`.
            cap: a limit of memory for all workers, besides their own.

        Returns:
            What is better and fits, and the best of all cuts, if it was found; and a time that no cut of this schedule
            that fits can beat: of the one found, if nothing was left out.
        """
        bounds, last = self.bounds, self.chain.num_blocks
        depth = self.spec.num_stages
        found: CutFound | None = None
        most = best.time if best is not None else float("inf")
        heap: list[tuple[float, int, Ends]] = [(self.least, 0, (0,))]
        while heap and heap[0][0] * (1 - _ROUNDING) < most:
            if time.monotonic() > until:
                return found, min(heap[0][0], most)
            bound, left, ends = heapq.heappop(heap)
            if len(ends) == depth + 1:
                better = self.look(ends, faster_than=most, cap=cap)
                if better is not None and better.excess <= 0:
                    found, most = better, better.time
                continue
            left = depth - len(ends)  # stages behind the one that is added
            stops = range(ends[-1] + 1, last - left + 1) if left else (last,)
            for stop in stops:
                longer = (*ends, stop)
                if bounds.beyond(longer, cap):
                    break  # more blocks need more still
                least = max(bound, bounds.of(longer))
                if least * (1 - _ROUNDING) < most:
                    heapq.heappush(heap, (least, left, longer))
        return found, most
