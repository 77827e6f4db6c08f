"""Lower bounds of a step's time for partly known cuts, computed without a simulation; the search prunes with them.

The bounded time is `Simulation.span`, for every order of ready actions: a worker must do all
its work, and stage 0's worker also waits while a microbatch passes the other stages and comes back. The work of stages
that are not known yet counts as if their workers could share it evenly. Loads without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..dependency import B, F, I, Kind, R, S, Spec, U, W
from .footprint import state_share
from .profile import Chain, Machines

#: boundaries of the stages: 0, the first block of stage 1, ..., the number of blocks
Ends = tuple[int, ...]


class Bounds:
    """Lower bounds of a step's time with one schedule on given machines, for cuts that are known in part or whole."""

    def __init__(self, spec: Spec, chain: Chain, machines: Machines, sizes: Sequence[float] = ()) -> None:
        self._spec, self._chain, self._machines, self._unequal = spec, chain, machines, bool(sizes)
        self._limits = [machines.limit(worker) for worker in range(spec.num_workers)]
        microbatches = range(spec.num_microbatches)
        #: how many microbatches take a route, and of these how many split their backward on a stage
        self._count = Counter(map(spec.route, microbatches))
        lengths = {r: [size for m, size in enumerate(sizes) if spec.route(m) == r] for r in self._count}
        #: by route, the costs of its mean microbatch, and of its longest one
        self._mean = {route: chain.among(own) for route, own in lengths.items()}
        self._longest = {route: chain.among(sorted(own)[-1:]) for route, own in lengths.items()}
        stages = range(spec.num_stages)
        self._split = [Counter(spec.route(m) for m in microbatches if spec.splits(s, m)) for s in stages]
        self._recomputes = [spec.recomputes(stage) for stage in stages]
        #: whether recomputation (R) waits for the gradient
        self._recompute_waits = not type(spec).recompute
        self._place = [[spec.place(s, r) for r in range(spec.num_routes)] for s in stages]
        self._slow = [machines.slow(worker) for worker in range(spec.num_workers)]
        #: of a microbatch's time and bytes, the least that a slice of its sequence takes
        sizes = spec.parallelism.slices
        self._time_share = min(min(chain.slicing.shares(sizes, attends=attends)) for attends in (True, False))
        self._byte_share = min(sizes) / sum(sizes)
        #: share of a stage's optimizer state that each of its workers holds
        self._state_share = state_share(spec)

    def bound(self, ends: Sequence[int]) -> float:
        """Return the bound of all cuts that begin with these boundaries.

        Args:
            ends: boundaries of the first stages, 0 first; of a complete cut `num_stages + 1` of them.
        """
        rest = range(len(ends) - 1, self._spec.num_stages)
        chains = {*self._mean.values(), *self._longest.values()}
        known = {chain: (self._stages(chain, ends), *self._unknown(chain, ends[-1], len(rest))) for chain in chains}
        loads, longest, unknown = [0.0] * len(self._slow), 0.0, 0.0
        for route, count in self._count.items():
            path = self._ways(ends, route)
            means, mean_forward, _, mean_backward = known[self._mean[route]]
            times, forward, back, _ = known[self._longest[route]]
            for stage, (mean, took) in enumerate(zip(means, times, strict=True)):
                worker = self._place[stage][route]
                loads[worker] += self._slow[worker] * self._work(stage, route, mean)
                path += self._slow[worker] * self._once(stage, route, took)
            path += min((self._slow[self._place[s][route]] for s in rest), default=0) * (forward + back)
            longest = max(longest, path)
            unknown += count * (mean_forward + mean_backward)
        workers = {self._place[stage][route] for stage in rest for route in self._count}
        speeds = {worker: 1 / self._slow[worker] for worker in workers}
        shared = unknown + sum(loads[worker] * speed for worker, speed in speeds.items())
        return max(longest, *loads, shared / sum(speeds.values()) if speeds else 0) + self._chain.per_step

    def _stages(self, chain: Chain, ends: Sequence[int]) -> list[dict[Kind, float]]:
        """Return the times of the known stages by kind; as `S`, the least of a whole backward if it may be split."""
        share = self._time_share
        return [
            {kind: chain.time(kind, a, b, share if kind is not U else 1) for kind in (F, B, I, W, R, U)}
            | ({S: chain.least_backward(a, b)[1] * share} if self._unequal else {})
            for a, b in pairwise(ends)
        ]

    def _unknown(self, chain: Chain, start: int, num_stages: int) -> tuple[float, float, float]:
        """Return the least times of the stages from `start`: forwards, backwards to the inputs, whole backwards."""
        last, around = chain.num_blocks, chain.per_stage
        share = self._time_share
        forward = chain.blocks_time(F, start, last) * share + num_stages * around[F]
        if not any(self._split):
            whole = chain.blocks_time(B, start, last) * share + num_stages * around[B]
            return forward, whole, whole
        back, whole = (took * share for took in chain.least_backward(start, last))
        back += num_stages * min(around[I], around[B])
        return forward, back, whole + num_stages * min(around[I] + around[W], around[B])

    def _work(self, stage: int, route: int, took: Mapping[Kind, float]) -> float:
        """Return the work of a stage for all microbatches of a route, on a worker of slowness 1."""
        count, split = self._count[route], self._split[stage][route]
        once = took[F] + (took[R] if self._recomputes[stage] else 0)
        if 0 < split < count and S in took:  # of unequal microbatches, any may be the split ones
            return count * (once + took[S]) + took[U]
        return count * once + split * (took[I] + took[W]) + (count - split) * took[B] + took[U]

    def _once(self, stage: int, route: int, took: Mapping[Kind, float]) -> float:
        """Return a stage's part of the path of one microbatch forward and back; the first stage's has all its backward.

        With the whole backward of the first stage its worker's part of the step ends.
        """
        split = self._split[stage][route]
        back = took[I] if stage else took[I] + took[W]
        if split < self._count[route]:
            back = min(back, took[B]) if split else took[B]
        return took[F] + back + (took[R] if self._recompute_waits and self._recomputes[stage] else 0)

    def _ways(self, ends: Sequence[int], route: int) -> float:
        """Return the transfer times of a microbatch there and back; where the cut is unknown, latencies alone."""
        total = 0.0
        for stage, (before, behind) in enumerate(pairwise(self._place)):
            here, there = before[route], behind[route]
            if here != there:
                there_and_back = self._machines.between(here, there), self._machines.between(there, here)
                sizes = (0.0, 0.0)
                if stage + 1 < len(ends):
                    sizes = self._chain.outputs(ends[stage + 1]), self._chain.inputs(ends[stage + 1])
                for link, size in zip(there_and_back, sizes, strict=True):
                    total += link.latency + size * self._byte_share / link.bandwidth
        return total

    def exceeds_memory(self, ends: Sequence[int]) -> bool:
        """Return whether the known stages alone exceed the memory of a worker."""
        chain, known = self._chain, len(ends) - 1
        for worker, limit in enumerate(self._limits):
            if limit is None:
                continue
            hosted = [(s, r) for s, r in self._spec.hosted(worker) if s < known]
            least = sum(chain.resident(ends[s], ends[s + 1], self._state_share) for s, _ in hosted)
            used = (self._longest[r].activations(ends[s], ends[s + 1]) for s, r in hosted if self._count[r])
            least += max(used, default=0) * self._byte_share * (1 - chain.slicing.state)
            if least > limit * (1 + 1e-9):
                return True
        return False


def schedule_free_bound(chain: Chain, machines: Machines, num_microbatches: int, share: float = 1) -> float:
    """Return a lower bound, in milliseconds, of a step with any schedule, cut and order.

    The workers must do all work, updates included, and the actions of one microbatch follow each other.

    Args:
        share: of a microbatch's time, for the shortest slice of its sequence, which runs through all stages.
    """
    slows = [machines.slow(w) for w in range(machines.num_workers)]
    once = chain.blocks_time(F, 0, chain.num_blocks)
    back, backward = chain.least_backward(0, chain.num_blocks)
    work = num_microbatches * (once + backward) + chain.blocks_time(U, 0, chain.num_blocks)
    return max((once + back) * share * min(slows), work / sum(1 / slow for slow in slows)) + chain.per_step
