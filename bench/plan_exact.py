"""The planner's best against brute force: every cut of every schedule, on random models and machines.

    python -m bench.plan_exact --count 500

Up to 10 blocks and 4 workers, all schedules with all their variants; whole random times, unequal workers, slow links,
tight memory, recomputation. Brute force shares the simulator, and nothing of the search. Prints a line for each
instance that differs, how many are equal, and how much slower the others are; the exit code is 1 if one is by 5 %.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from rpc_pipe.dependency import Action, B, F, G, I, R, S, U, W
from rpc_pipe.planning.footprint import Size, payload_bytes, peak_bytes
from rpc_pipe.planning.plan import Plan
from rpc_pipe.planning.profile import LayerCost, Machines, Profile
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.search import PlanRequest, candidates, search, spec_of
from rpc_pipe.planning.simulator import Link, simulate


def instance(seed: int) -> PlanRequest:
    """Return a random model on random machines; numbers are whole, so that sums are exact."""
    draw = random.Random(seed)
    num_workers = draw.randint(1, 4)
    blocks = []
    skew = draw.choice((1, 4, 20))
    crossing = [float(draw.randint(1, 50)) for _ in range(11)]
    for i in range(draw.randint(num_workers, 10)):
        inputs, weights = draw.randint(1, 20 * skew), draw.randint(0, 20)
        times = {
            F: draw.randint(1, 20 * skew),
            I: inputs,
            W: weights,
            B: inputs + weights,
            U: draw.randint(0, 3),
            G: draw.randint(0, 3),
        }
        times[R] = times[F]
        kept = float(draw.randint(1, 100) + crossing[i])
        shard = [float(draw.randint(0, 30)) for _ in range(3)]
        after = float(draw.randint(0, int(kept)))
        size = Size(shard[0], shard[1], shard[2], kept, after, crossing[i], crossing[i + 1])
        blocks.append(LayerCost(times, size, f"block {i}"))
    slowness = tuple(float(draw.randint(1, 3)) for _ in range(num_workers)) if draw.random() < 0.4 else ()
    links, link = {}, Link(float(draw.choice((0, 0, 1, 5, 30))))
    if draw.random() < 0.3 and num_workers > 1:
        a = draw.randrange(num_workers - 1)
        links = {(a, a + 1): Link(float(draw.randint(0, 40)), 1.0), (a + 1, a): Link(float(draw.randint(0, 40)), 2.0)}
    total = sum(b.size.shard + 4 * b.size.activations for b in blocks)
    memory: tuple[float | None, ...] = ()
    if draw.random() < 0.5:
        memory = tuple(total * draw.choice((0.2, 0.35, 0.5, 1.0)) for _ in range(num_workers))
    machines = Machines(num_workers, slowness, memory, link, links)
    microbatches = tuple(sorted(draw.sample((1, 2, 3, 4, 5, 6, 8), draw.choice((1, 1, 2)))))
    profile = Profile({8 // count or 1: blocks for count in microbatches} | {1: blocks, 8: blocks})
    recompute = draw.random() < 0.3
    profile = replace(profile, per_mib=2.0**20 * draw.choice((0, 0, 0.125, 0.25, 1)))
    return PlanRequest(profile, machines, 8, microbatches, recompute=recompute)


def brute_force(request: PlanRequest) -> float | None:
    """Return the least time of all schedules and cuts that fit; None: none fits."""
    best: float | None = None
    machines = request.machines
    num_blocks = request.profile.num_blocks
    for candidate in candidates(
        machines.num_workers,
        request.microbatches,
        recompute=request.recompute,
        most_stages=num_blocks,
        schedules=request.schedules,
        replicas=request.replicas,
        slices=[request.slicing.balanced(count) for count in request.slices],
    ):
        for took in _all_cuts(request, candidate, num_blocks):
            if best is None or took < best:
                best = took
    return best


def _all_cuts(request: PlanRequest, candidate: Plan, num_blocks: int) -> Iterator[float]:
    machines = request.machines
    rows = request.batch / candidate.num_microbatches
    blocks = request.profile.at(rows)  # with lengths: of their mean
    at_length = {length: request.profile.at_length(rows, length) for length in request.lengths} | {0: blocks}
    spec = spec_of(candidate, machines.num_workers)
    relation, slicing = Relation(spec, lengths=request.ordered(spec)), request.slicing
    time_share = slicing.time_share(spec)
    workers = range(machines.num_workers)
    copying = request.profile.per_mib / 2**20
    links = {(a, b): _without(machines.between(a, b), copying) for a in workers for b in workers if a != b}
    for inner in combinations(range(1, num_blocks), spec.num_stages - 1):
        ends = (0, *inner, num_blocks)
        stages = [blocks[a:b] for a, b in pairwise(ends)]
        sizes = [_sum([block.size for block in stage]) for stage in stages]
        # The first stage owes nobody a gradient: of a backward in two parts it does all in W.
        sizes[0] = replace(sizes[0], after_inputs=sizes[0].activations + sizes[0].outputs)

        def cost(action: Action, ends: tuple[int, ...] = ends) -> float:
            kind = G if action.kind is S else action.kind
            if not action.stage and kind in (I, W):
                kind = B
            inside = slice(ends[action.stage], ends[action.stage + 1])
            once = sum(block.times.get(kind, 0) for block in at_length[relation.length(action)][inside])
            once *= action.stage > 0 or action.kind is not I
            summed = {G: 0, S: 1 - 1 / spec.num_routes}.get(action.kind, 1)
            share = time_share(action._replace(kind=kind) if kind is B else action)
            return once * share * machines.slow(spec.worker(action)) * summed + copying * moved(action)

        def moved(action: Action, sizes: list[Size] = sizes) -> float:
            if action.kind not in (F, B, I):
                return 0
            size, route = sizes[action.stage], spec.route(action.index)
            sides = [(action.stage - 1, size.inputs), (action.stage + 1, size.outputs)]
            here = spec.worker(action)
            sent = sum(n for s, n in sides if 0 <= s < spec.num_stages and spec.place(s, route) != here)
            return sent * relation.portion(action)

        def payload(action: Action, sizes: list[Size] = sizes) -> float:
            return payload_bytes(action, sizes[action.stage], spec.num_routes) * relation.portion(action)

        run = simulate(relation, cost, links=links, payload=payload)
        limits = [machines.limit(worker) for worker in workers]
        held = peak_bytes(run, sizes) if any(limit is not None for limit in limits) else ()
        if all(limit is None or used <= limit for used, limit in zip(held, limits, strict=False)):
            yield run.span


def _without(link: Link, copying: float) -> Link:
    """Return a link without the time of its payloads that counts as computing of those at its ends."""
    left = 1 / link.bandwidth - 2 * copying
    return Link(link.latency, 1 / left if left > 0 else float("inf"))


def _sum(sizes: list[Size]) -> Size:
    total = sizes[0]
    for size in sizes[1:]:
        total += size
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--first", type=int, default=0, help="seed of the first instance (0)")
    parser.add_argument("--count", type=int, default=500, help="how many (500)")
    options = parser.parse_args()
    equal = fits = 0
    by_search = by_force = worst = 0.0
    for seed in range(options.first, options.first + options.count):
        request = instance(seed)
        start = time.perf_counter()
        result = search(request)
        middle = time.perf_counter()
        expected = brute_force(request)
        by_search += middle - start
        by_force += time.perf_counter() - middle
        found = result.plans[0].predicted_ms if result.plans else None
        equal += found == expected
        fits += expected is not None
        if found != expected:
            worst = max(worst, found / expected - 1 if found and expected else float("inf"))
            print(f"seed {seed}: found {found}, brute force {expected}")
    print(
        f"{equal} of {options.count} equal ({fits} have a plan that fits), others up to {worst:.1%} slower; "
        f"{by_search:.1f} s, {by_force:.1f} s by force"
    )
    return int(worst > 0.05)


if __name__ == "__main__":
    sys.exit(main())
