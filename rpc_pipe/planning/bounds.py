"""Lower bounds of a step's time for partly known cuts, computed without a simulation, by which the search prunes.

The bounded time is `Simulation.span`, for every order in which workers may run what is ready. For each
worker:

    it must do all its work; and between the first and the last action of stage 0's worker lie the forwards of the
    stages before its own, all its work but W and updates, and the way of its last backward back to stage 0;
    before its first backward, which needs every forward and the backwards of later stages of one microbatch, it runs
    at most as many forwards as it may hold activations: all its other work comes after.

The work of stages that are not known yet counts as if their workers could share it evenly. Loads without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ..dependency import B, F, I, Kind, R, Spec, U, W, order_limit
from .profile import Chain, Machines

#: one microbatch's path: by known stage, the time before its F and after its backward; all forwards; the whole path
_Path = tuple[list[float], list[float], float, float]
#: boundaries of the stages: 0, the first block of stage 1, ..., the number of blocks
Ends = tuple[int, ...]
#: of (stage, first block, the block after its last)
StageCost = Callable[[int, int, int], float]
StageFits = Callable[[int, int, int], bool]


class Bounds:
    """Lower bounds of a step's time with one schedule on given machines, for cuts that are known in part or whole."""

    def __init__(self, spec: Spec, chain: Chain, machines: Machines) -> None:
        self.spec, self.chain, self.machines = spec, chain, machines
        self._num_stages = spec.num_stages
        microbatches = Counter(map(spec.route, range(spec.num_microbatches)))
        self._routes = sorted(microbatches)
        self._num_microbatches = [microbatches[r] for r in range(spec.num_routes)]
        stages = range(spec.num_stages)
        self._worker = [[spec.place(s, r) for r in range(spec.num_routes)] for s in stages]
        self._slow = [[machines.slow(w) for w in row] for row in self._worker]
        self._hosted: list[list[tuple[int, int]]] = [
            [shard for shard in spec.hosted(w) if self._num_microbatches[shard[1]]] for w in range(spec.num_workers)
        ]
        #: by stage and route, how many backwards are split into I and W
        split = [Counter(spec.route(m) for m in range(spec.num_microbatches) if spec.splits(s, m)) for s in stages]
        self._num_split = [[found[r] for r in range(spec.num_routes)] for found in split]
        self.any_split = any(any(row) for row in self._num_split)
        self._recomputes = [spec.recomputes(s) for s in stages]
        #: whether recomputation (R) waits for the gradient
        self._recompute_waits = not type(spec).recompute
        self._max_held = [self._max_held_on(w) for w in range(spec.num_workers)]
        self._only_route = spec.num_routes == 1

    def _max_held_on(self, worker: int) -> int:
        all_of_them = sum(self._num_microbatches[r] for _, r in self._hosted[worker])
        claims = (self.spec.peak_activations(worker), order_limit(self.spec, worker))
        return min([all_of_them, *(claim for claim in claims if claim is not None)])

    def bound(self, ends: Sequence[int]) -> float:
        """Return the bound of all cuts that begin with these boundaries.

        Args:
            ends: boundaries of the first stages, 0 first; of a complete cut `num_stages + 1` of them.
        """
        return _PartialCut(self, ends).bound()

    @property
    def is_plain(self) -> bool:
        """Whether each worker has one stage, and all microbatches take one route."""
        return self.spec.num_routes == 1 and all(len(hosted) == 1 for hosted in self._hosted)

    def slowest_stage_time(self, stage: int, start: int, stop: int) -> float:
        """Return the time that a stage of these blocks adds to the path of one microbatch if it is the slowest stage.

        It grows with the blocks, so `least_bottleneck` minimises its maximum over stages exactly.
        """
        chain, count, slow = self.chain, self._num_microbatches[0], self._slow[stage][0]
        # The stage's number, not its first block, tells the first stage here: stages before it may be empty.
        times = {kind: chain.blocks_time(kind, start, stop) + chain.per_stage[kind] for kind in (F, B, I, W, R)}
        split = self._num_split[stage][0]
        if not stage:
            times[I], times[W] = chain.per_stage[I], chain.blocks_time(B, start, stop) + chain.per_stage[W]
        back = self.input_backward(stage, 0, times)
        again = times[R] if self._recomputes[stage] else 0
        held = self._max_held[self._worker[stage][0]]
        if not self._recompute_waits:
            return slow * ((count - held) * (times[F] + again) + (count - 1) * back)
        adds = slow * ((count - held) * times[F] + (count - 1) * (back + again))
        if count > held:
            once = times[F] + again + (min(times[I] + times[W], times[B]) if split else times[B])
            last, left = chain.num_blocks, self._num_stages - stage - 1
            below = chain.blocks_time(F, stop, last) + left * chain.per_stage[F]
            below += self.unknown_backward(stop, left)[0]
            fastest = min((row[0] for row in self._slow[stage + 1 :]), default=0)
            # So that it grows with the blocks: what the stages behind lose by them counts here at least as much.
            adds = max(adds, slow * (count - held) * once + min(slow, fastest) * below)
        return adds

    def input_backward(self, stage: int, route: int, times: Mapping[Kind, float]) -> float:
        """Return the least time of a stage from the arrival of a gradient to sending the gradient of its inputs.

        Of the first stage it is the whole backward, with which its worker's part of the step ends.
        """
        split = self._num_split[stage][route]
        part = times[I] if stage else times[I] + times[W]
        back = part if split else times[B]
        return min(back, times[B]) if 0 < split < self._num_microbatches[route] else back

    def unknown_backward(self, start: int, num_stages: int) -> tuple[float, float]:
        """Return the sums of these times, and of those of whole backwards, for `num_stages` stages from `start` on.

        They hold for any cut of the blocks from `start` on.
        """
        chain, last, around = self.chain, self.chain.num_blocks, self.chain.per_stage
        if not self.any_split:
            whole = chain.blocks_time(B, start, last) + num_stages * around[B]
            return whole, whole
        inputs = chain.least_input_backward(start, last) + num_stages * min(around[I], around[B])
        return inputs, chain.least_backward(start, last) + num_stages * min(around[I] + around[W], around[B])

    def everywhere(self) -> float:
        """Return a bound of all cuts; infinity if none fits."""
        bound = self.bound((0,))
        if not self.is_plain:
            return bound
        chain, limits = self.chain, [self.machines.limit(self._worker[s][0]) for s in range(self._num_stages)]

        def fits(stage: int, a: int, b: int) -> bool:
            limit = limits[stage]
            return limit is None or chain.resident(a, b) + chain.activations(a, b) <= limit * (1 + 1e-9)

        ends = least_bottleneck(chain.num_blocks, self._num_stages, self.slowest_stage_time, fits, may_be_empty=True)
        if ends is None:
            return float("inf")
        path = _PartialCut(self, (0,)).path() + costliest(ends, self.slowest_stage_time)
        return max(bound, path * (1 - 1e-9) + chain.per_step)

    def exceeds_memory(self, ends: Sequence[int], cap: float | None = None) -> bool:
        """Return whether the known stages alone exceed the memory of a worker."""
        chain, limits = self.chain, [self.machines.limit(w) for w in range(self.spec.num_workers)]
        if cap is None and not any(limit is not None for limit in limits):
            return False
        known = len(ends) - 1
        for worker, limit in enumerate(limits):
            least = sum(chain.resident(ends[s], ends[s + 1]) for s, _ in self.spec.hosted(worker) if s < known)
            used = (s for s, _ in self._hosted[worker] if s < known)
            least += max((chain.activations(ends[s], ends[s + 1]) for s in used), default=0)
            if any(most is not None and least > most * (1 + 1e-9) for most in (limit, cap)):
                return True
        return False


class _PartialCut:
    """The bound of one cut whose first stages are known."""

    def __init__(self, bounds: Bounds, ends: Sequence[int]) -> None:
        self._bounds = bounds
        self._known = len(ends) - 1
        chain = bounds.chain
        self._times = {kind: [chain.time(kind, a, b) for a, b in pairwise(ends)] for kind in (F, B, I, W, R, U)}
        self._ends = ends
        self._rest = bounds._num_stages - self._known

    def _unknown_forward(self) -> float:
        """Return the time of the forwards of all unknown stages on a worker of slowness 1."""
        chain, start = self._bounds.chain, self._ends[-1]
        if not self._rest:
            return 0
        return chain.blocks_time(F, start, chain.num_blocks) + self._rest * chain.per_stage[F]

    def _input_backward(self, stage: int, route: int) -> float:
        """Return `Bounds.input_backward` of a known stage with its recomputation, on a worker of slowness 1."""
        b, times = self._bounds, self._times
        back = b.input_backward(stage, route, {kind: times[kind][stage] for kind in (B, I, W)})
        return back + (times[R][stage] if b._recompute_waits and b._recomputes[stage] else 0)

    def _transfer(self, stage: int, route: int, back: bool) -> float:
        """Return the transfer time between a stage and the next, of a payload or its gradient; at least the latency."""
        b = self._bounds
        here, there = b._worker[stage][route], b._worker[stage + 1][route]
        if here == there:
            return 0
        link = b.machines.between(there, here) if back else b.machines.between(here, there)
        if stage >= self._known or link.bandwidth == float("inf"):
            return link.latency
        size = (b.chain.inputs if back else b.chain.outputs)(self._ends[stage + 1])
        return link.latency + size / link.bandwidth

    def _path(self, route: int) -> _Path:
        """Return the least times on the path of one microbatch."""
        b, known = self._bounds, self._known
        heads, tails, head, tail = [], [], 0.0, 0.0
        for stage in range(known):
            slow = b._slow[stage][route]
            heads.append(head)
            tails.append(tail)
            head += self._times[F][stage] * slow
            tail += self._input_backward(stage, route) * slow
            if stage + 1 < b._num_stages:
                head += self._transfer(stage, route, False)
                tail += self._transfer(stage, route, True)
        fastest = min((b._slow[s][route] for s in range(known, b._num_stages)), default=0)
        hops = range(known, b._num_stages - 1)
        forwards = head + self._unknown_forward() * fastest + sum(self._transfer(s, route, False) for s in hops)
        back = b.unknown_backward(self._ends[-1], self._rest)[0] * fastest
        back += sum(self._transfer(s, route, True) for s in hops)
        return [*heads, head], [*tails, tail], forwards, forwards + back + tail

    def path(self) -> float:
        """Return the least time of one microbatch forward and backward."""
        return max(self._path(route)[3] for route in self._bounds._routes)

    def bound(self) -> float:
        b, known = self._bounds, self._known
        paths = {route: self._path(route) for route in b._routes}
        found = [path[3] for path in paths.values()]
        loads = []
        for worker, hosted in enumerate(b._hosted):
            own = [(s, r) for s, r in hosted if s < known]
            load, weights, updates = self._load(own)
            loads.append((load, weights + updates))
            if not hosted:
                continue
            found.append(load)
            begins = {route: min(paths[route][0][min(s, known)] for s, r in hosted if r == route)
                      for route in {r for _, r in hosted}}  # fmt: skip
            before = self._forwards_before(own, b._max_held[worker])
            found.append(min(self._first_backward_start(paths[r], s, r) - begins[r] for s, r in hosted) - before + load)
            if b._only_route:  # the step begins and ends on the worker of its stage 0
                after = min(paths[r][1][min(s, known)] for s, r in hosted)
                late = min(self._first_backward_start(paths[r], s, r) for s, r in hosted) - before
                found.append(max(late, min(begins.values())) + load - weights - updates + after)
        if self._rest:
            found.append(self._evenly_shared(loads, paths))
        return max(found) + b.chain.per_step

    def _load(self, own: list[tuple[int, int]]) -> tuple[float, float, float]:
        """Return the work of a worker's known stages, updates included, and the parts of it that are W and updates."""
        b, times = self._bounds, self._times
        load = weights = updates = 0.0
        for s, r in own:
            count, split, slow = b._num_microbatches[r], b._num_split[s][r], b._slow[s][r]
            weights += split * times[W][s] * slow
            updates += times[U][s] * slow
            again = times[R][s] if b._recomputes[s] else 0
            whole = count * (times[F][s] + again) + split * times[I][s] + (count - split) * times[B][s]
            load += whole * slow
        return load + weights + updates, weights, updates

    def _first_backward_start(self, path: _Path, stage: int, route: int) -> float:
        """Return the least time until the first backward of a stage begins."""
        b, (_, tails, forwards, whole) = self._bounds, path
        if stage >= self._known:
            return forwards
        return whole - tails[stage] - self._input_backward(stage, route) * b._slow[stage][route]

    def _forwards_before(self, own: list[tuple[int, int]], held: int) -> float:
        """Return the longest that `held` forwards can take, with recomputation that need not wait for gradients."""
        b, times, total = self._bounds, self._times, 0.0
        again = not b._recompute_waits
        each = [
            ((times[F][s] + (times[R][s] if again and b._recomputes[s] else 0)) * b._slow[s][r], b._num_microbatches[r])
            for s, r in own
        ]
        for time, count in sorted(each, reverse=True):
            total += time * min(count, held)
            held -= min(count, held)
        return total

    def _evenly_shared(self, loads: Sequence[tuple[float, float]], paths: Mapping[int, _Path]) -> float:
        """Return the least time of the workers of unknown stages if they could share all their work evenly.

        Args:
            loads: by worker, the work of known stages, and the part of it that need not precede the end of stage 0.
        """
        b, known = self._bounds, self._known
        workers = {b._worker[s][r] for s in range(known, b._num_stages) for r in b._routes}
        speeds = {w: 1 / b.machines.slow(w) for w in workers if b.machines.slow(w) > 0}
        if not speeds:
            return 0
        count, forward = sum(b._num_microbatches[r] for r in b._routes), self._unknown_forward()
        back, backward = b.unknown_backward(self._ends[-1], self._rest)
        done = sum(loads[w][0] * speed for w, speed in speeds.items())
        needed = (count * (forward + backward) + done) / sum(speeds.values())
        if not b._only_route:
            return needed
        # Stage 0 waits for no W and no update of the other stages.
        firm = sum((loads[w][0] - loads[w][1]) * speed for w, speed in speeds.items())
        path = paths[0]
        hosted = [min(s, known) for w in speeds for s, _ in b._hosted[w]]
        around = min(path[0][s] for s in hosted) + min(path[1][s] for s in hosted)
        return max(needed, around + (count * (forward + back) + firm) / sum(speeds.values()))


def least_bottleneck(
    num_blocks: int,
    num_stages: int,
    cost: StageCost,
    fits: StageFits = lambda stage, start, stop: True,
    *,
    may_be_empty: bool = False,
) -> Ends | None:
    """Return the boundaries of a cut with a cheap costliest stage; None: no cut that fits was found.

    For a given threshold it is optimal to give each stage in turn as many blocks as stay below it; bisection finds the
    least threshold. So if stages may be empty, the cut is optimal and a lower bound of all others; if each must have a
    block, it is optimal provided that every stage can take every single block.

    Args:
        cost: of (stage, first block, block behind the last); must grow with the blocks.
        fits: whether a stage may have these blocks; if so, it may have fewer of them too.
    """

    def fill(most: float) -> Ends | None:
        ends = [0]
        for stage in range(num_stages):
            start = ends[-1]
            low, high = start, num_blocks
            if not may_be_empty:
                low, high = start + 1, num_blocks - (num_stages - stage - 1)  # a block each for the stages behind
            if cost(stage, start, low) > most or not fits(stage, start, low):
                return None
            while low < high:
                middle = (low + high + 1) // 2
                if cost(stage, start, middle) <= most and fits(stage, start, middle):
                    low = middle
                else:
                    high = middle - 1
            ends.append(low)
        return tuple(ends) if ends[-1] == num_blocks else None

    best = fill(float("inf"))
    if best is None:
        return None
    low, high = 0.0, costliest(best, cost)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        found = fill(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, costliest(found, cost))
    return best


def costliest(ends: Sequence[int], cost: StageCost) -> float:
    """Return the cost of the costliest stage of a cut."""
    return max(cost(stage, a, b) for stage, (a, b) in enumerate(pairwise(ends)))
