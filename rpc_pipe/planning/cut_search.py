"""The cut of a model with the shortest simulated step of one schedule, within the workers' memory.

First a balanced cut, then hill climbing. Loads without torch.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product, takewhile

from ..dependency import B, F, I, R, Spec, U, W
from .footprint import of_share
from .pricing import CutFound, Ends, PricedSchedule
from .profile import Chain, Machines

#: up to this number of cuts, all are simulated
_FEW = 128


class CutSearch:
    """The search for the best cut with one schedule. Every simulated cut is remembered."""

    def __init__(self, spec: Spec, chain: Chain, machines: Machines, lengths: Sequence[float] = ()) -> None:
        self.spec, self.chain, self.machines, self.lengths = spec, chain, machines, lengths
        again = sum(map(spec.recomputes, range(spec.num_stages))) / spec.num_stages
        work = self._work(0, chain.num_blocks, splits=spec.splits(spec.last_stage, 0), again=again)
        #: time of a step if the workers shared all work evenly
        self.least = work / sum(1 / machines.slow(worker) for worker in range(spec.num_workers))
        self.priced = PricedSchedule(spec, chain, machines, lengths)

    def price(self, ends: Ends, *, faster_than: float = float("inf")) -> CutFound | None:
        """Simulate a cut; return None if it is not faster than `faster_than`."""
        known = self.priced.found(ends, faster_than)
        return known if known.time < faster_than and known.memory else None

    def found(self) -> Iterator[CutFound]:
        """Return the simulated cuts with known memory."""
        return (known for known in self.priced.known.values() if known.memory)

    # --- a good cut quickly

    @property
    def expected(self) -> float:
        """An estimate of a step of even stages, by its work, its longest path, and how many microbatches are held."""
        spec, chain = self.spec, self.chain
        shards = [stage for worker in spec.workers for stage, _ in spec.hosted(worker)]
        depth, each = spec.num_stages, spec.num_microbatches / shards.count(0)
        kinds = F, I if spec.splits(depth - 1, 0) else B
        both = sum(chain.time(kind, 0, chain.num_blocks) for kind in kinds) / depth
        both *= spec.num_whole / spec.num_microbatches
        way = (depth - 1) * both
        # Schedules of several stages a worker, or of split backwards, hide half of the way or more.
        longest = max(self.least + way / 2, way + each * both)
        for worker in {spec.place(stage, 0) for stage in range(depth)}:
            if held := spec.peak_activations(worker):
                longest = max(longest, sum(depth - stage for stage, _ in spec.hosted(worker)) * both * each / held)
        return longest

    def _work(self, start: int, stop: int, *, splits: bool, again: float) -> float:
        """Return the time of these blocks in a step, as one stage; `again`: the share of them that recomputes."""
        chain, count = self.chain, self.spec.num_whole
        kinds = (F, I, W) if splits else (F, B)
        once = sum(chain.time(kind, start, stop) for kind in kinds) + again * chain.time(R, start, stop)
        return count * once + chain.time(U, start, stop)

    def balanced(self, *, roomy: bool = False) -> Ends:
        """Return the fitting cut with the fastest slowest stage, by an estimate of each stage alone.

        Args:
            roomy: leave room for an incoming and an outgoing payload, and for working memory.
        """
        spec, chain = self.spec, self.chain
        count, depth = spec.num_microbatches, spec.num_stages
        slow, share = [float("inf")] * depth, spec.num_whole / spec.num_microbatches
        for worker in range(spec.num_workers):
            for stage, _ in spec.hosted(worker):
                slow[stage] = min(slow[stage], self.machines.slow(worker))
        stages, hosts = range(depth), [spec.place(s, 0) for s in range(depth)]
        split, again = [spec.splits(s, 0) for s in stages], list(map(spec.recomputes, stages))
        shares, limits = [len(spec.hosted(worker)) for worker in hosts], list(map(self.machines.limit, hosts))
        held = [spec.peak_activations(worker) or count for worker in hosts]

        def load(stage: int, a: int, b: int) -> float:
            return slow[stage] * shares[stage] * self._work(a, b, splits=split[stage], again=again[stage])

        def fits(stage: int, a: int, b: int) -> bool:
            limit = limits[stage]
            if limit is None:
                return True
            size = of_share(chain.size(a, b), share)
            kept = size.inputs if again[stage] else size.activations
            room = roomy * (size.inputs + size.outputs + size.working)
            return size.shard + held[stage] / shares[stage] * kept + room <= limit / shares[stage]

        blocks = chain.num_blocks
        found = least_bottleneck(blocks, depth, load, fits) or least_bottleneck(blocks, depth, load)
        assert found is not None
        return found

    def first_cut(self) -> CutFound:
        """Return the balanced cut, or the roomier one if that does not fit."""
        best = self.price(self.balanced())
        assert best is not None
        if best.excess > 0 and (roomier := self.price(self.balanced(roomy=True))) is not None:
            best = min(best, roomier, key=lambda found: found.rank)
        return best

    def climb(self, until: float) -> CutFound:
        """Return the result of hill climbing from the first cut until `time.monotonic()` is `until`.

        A move brings blocks from one stage to another, nearby stages first. If there are few cuts, all are simulated.
        """
        best, blocks, depth = self.first_cut(), self.chain.num_blocks, self.spec.num_stages
        if math.comb(blocks - 1, depth - 1) <= _FEW:
            inner = takewhile(lambda _: time.monotonic() < until, combinations(range(1, blocks), depth - 1))
            every = (self.price((0, *ends, blocks)) for ends in inner)
            return min((found for found in (best, *every) if found is not None), key=lambda found: found.rank)
        step = max(1, blocks // (4 * depth))
        while step:
            better: CutFound | None = best
            while better is not None and time.monotonic() < until:
                best = better
                better = self._better(best, step, until)
            step //= 2
        return best

    def _better(self, best: CutFound, step: int, until: float) -> CutFound | None:
        """Return a better cut, with blocks moved from one stage to another; None: there is none, or time is over."""
        ends, depth = best.ends, self.spec.num_stages
        # A cut that does not fit may become slower until it fits.
        faster_than = float("inf") if best.excess > 0 else best.time
        for between, first, by in product(range(1, depth), range(1, depth), (step, -step)):
            behind = first + between
            moved = (*ends[:first], *(end + by for end in ends[first:behind]), *ends[behind:])
            if behind <= depth and moved[first - 1] < moved[first] and moved[behind - 1] < moved[behind]:
                found = self.price(moved, faster_than=faster_than)
                if found is not None and found.rank < best.rank:
                    return found
            if time.monotonic() > until:
                return None
        return None


def least_bottleneck(
    num_blocks: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    fits: Callable[[int, int, int], bool] = lambda stage, start, stop: True,
) -> Ends | None:
    """Return the boundaries of a cut with a cheap costliest stage; None: no cut that fits was found.

    For a given threshold each stage in turn gets the most blocks that stay below it, and leaves a block for each later;
    bisection finds the least threshold. That is optimal provided that every stage can take every single block.

    Args:
        cost: of (stage, first block, block behind the last); must grow with the blocks.
        fits: whether a stage may have these blocks; if so, it may have fewer of them too.
    """

    def fill(most: float) -> Ends | None:
        ends = [0]
        for stage in range(num_stages):
            start = ends[-1]
            low, high = start + 1, num_blocks - (num_stages - stage - 1)
            if cost(stage, start, low) > most or not fits(stage, start, low):
                return None
            while low < high:
                middle = (low + high + 1) // 2
                fine = cost(stage, start, middle) <= most and fits(stage, start, middle)
                low, high = (middle, high) if fine else (low, middle - 1)
            ends.append(low)
        return tuple(ends) if ends[-1] == num_blocks else None

    best = fill(float("inf"))
    low, high = 0.0, 0.0 if best is None else costliest(best, cost)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if (found := fill(middle)) is None:
            low = middle
        else:
            best, high = found, min(middle, costliest(found, cost))
    return best


def costliest(ends: Sequence[int], cost: Callable[[int, int, int], float]) -> float:
    """Return the cost of the costliest stage of a cut."""
    return max(cost(stage, a, b) for stage, (a, b) in enumerate(pairwise(ends)))
