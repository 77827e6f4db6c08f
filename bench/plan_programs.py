"""Searched programs against every schedule of ours, at the same activations.

    python -m bench.plan_programs --workers 4 8 --seconds 25

M = 2 P microbatches, F = I = W unless --costs says otherwise, equal stages, links that take no time. For each budget of
activations, in parts of 1F1B's: the bubble of the searched program among other steps, that of the best schedule of ours
that keeps within the budget on every worker, and ZB-V's. A program that is worse than one of ours ends with
exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from rpc_pipe.dependency import Action, B, F, I, Kind, PipeError, R, Spec, W, check_all
from rpc_pipe.planning.listed_schedule import ListedSchedule
from rpc_pipe.planning.program_search import JobShop, best_order, listed, placement_of, split_backwards
from rpc_pipe.planning.search import candidates, spec_of
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec

#: parts of what 1F1B keeps
BUDGETS = (1 / 3, 0.4, 0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 2.0)


class _Placed(Spec):
    """Only a placement: `chunks` stages on each worker, in turns of one direction or forth and back."""

    chunks: int = 1
    zigzag: bool = False

    @property
    def num_stages(self) -> int:
        return self.chunks * self.num_workers

    def place(self, stage: int, route: int) -> int:
        turn, at = divmod(stage, self.num_workers)
        return self.num_workers - 1 - at if self.zigzag and turn % 2 else at

    def splits(self, stage: int, microbatch: int) -> bool:
        return True


#: placements that are tried: a line, forth and back, around, and both with twice the stages
_PLACEMENTS = ((1, False), (2, True), (2, False), (4, False), (4, True))


def searched_program(
    num_workers: int,
    num_microbatches: int,
    costs: Mapping[Kind, float],
    budget: float,
    seconds: float,
) -> ListedSchedule | None:
    """Return the shortest program found for workers with equal shares of a model; None: nothing fits the budget.

    Args:
        costs: time of a microbatch on a worker's share, of F, I and W; stages of 1/v share cost 1/v.
        budget: most activations of a worker, in microbatches of its share.
    """
    until = time.monotonic() + seconds
    best: tuple[float, ListedSchedule] | None = None
    whole = costs[F] + costs[I] + costs[W]
    placed = list(_placed(num_workers, num_microbatches))
    ours = list(_ours(placed, num_microbatches))
    for number, spec in enumerate(placed):
        chunks = spec.num_stages / num_workers
        shop = JobShop(
            spec,
            lambda action, chunks=chunks: costs[action.kind] / chunks,  # type: ignore[misc]
            lambda action, source, target: 0.0,
            [1.0] * spec.num_stages,
            [1.0] * spec.num_stages,
            [budget * chunks] * num_workers,
        )
        if best is not None and best[0] <= num_microbatches * whole * (1 + 1e-12):
            break
        seeds = [shop.from_program(rows) for rows in _orders_of_ours(spec, ours, costs, chunks)]
        end = time.monotonic() + (until - time.monotonic()) / (len(placed) - number)
        found = best_order(shop, seeds, end)
        if found is not None and (best is None or found[0] < best[0]):
            best = found[0], listed(shop.to_program(found[1]), spec)
    return None if best is None else best[1]


def _placed(num_workers: int, num_microbatches: int) -> Iterator[Spec]:
    """Yield what gives placements: stages in a line, in turns, and replicas as Chimera and DualPipe have them."""
    for chunks, zigzag in _PLACEMENTS:
        yield _Placed(num_workers=num_workers, num_microbatches=num_microbatches, chunks=chunks, zigzag=zigzag)
    for pairs in range(1, num_workers // 2 + 1):
        with suppress(PipeError):
            spec = make_spec("chimera", num_workers, num_microbatches, {"pairs": pairs})
            yield listed(split_backwards(simulate(spec, lambda action: 1.0).orders()), spec)


def _ours(placed: Sequence[Spec], num_microbatches: int) -> Iterator[tuple[Spec, object]]:
    """Yield schedules of ours that have as few stages as one of these, with their placements."""
    workers, most = placed[0].num_workers, max(spec.num_stages for spec in placed)
    for candidate in candidates(workers, [num_microbatches], recompute=False, most_stages=most):
        spec = spec_of(candidate, workers)
        if not type(spec).recompute:
            yield spec, placement_of(spec)


def _orders_of_ours(
    placed: Spec, ours: Sequence[tuple[Spec, object]], costs: Mapping[Kind, float], chunks: float
) -> Iterator[list[list[Action]]]:
    """Yield the orders of schedules of ours with the same placement, as they run with these costs."""
    times = {F: costs[F] / chunks, B: (costs[I] + costs[W]) / chunks, I: costs[I] / chunks, W: costs[W] / chunks}
    wanted = placement_of(placed)
    for spec, placement in ours:
        if placement == wanted:
            yield split_backwards(simulate(spec, uniform(times)).orders())


def of_ours(num_workers: int, count: int, costs: Mapping[Kind, float]) -> list[tuple[str, float, float]]:
    """Return (name, activations in shares of a worker, bubble) of every schedule, in both orders."""
    found = []
    for candidate in candidates(num_workers, [count], recompute=False, most_stages=16 * num_workers):
        spec = spec_of(candidate, num_workers)
        if type(spec).recompute:
            continue
        chunks = spec.num_stages / num_workers
        times = {kind: costs.get(kind, 0) / chunks for kind in (F, I, W)}
        times[B] = times[I] + times[W]
        times[R] = times[F]
        run = simulate(spec, lambda action, times=times: times.get(action.kind, 0))  # type: ignore[misc]
        name = f"{candidate.schedule} {','.join(f'{k}={v}' for k, v in candidate.parameters.items())}".strip()
        found.append((name, max(run.peak_activations) / chunks, run.steady_bubble))
    return found


def bubble_of(spec: Spec, costs: Mapping[Kind, float]) -> tuple[float, float]:
    """Return the bubble of a program, as the simulator says of the schedule that the checker has proven, and acts."""
    check_all(spec)
    chunks = spec.num_stages / spec.num_workers
    run = simulate(spec, lambda action: costs.get(action.kind, 0) / chunks)
    return run.steady_bubble, max(run.peak_activations) / chunks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seconds", type=float, default=25, help="for each budget (25)")
    parser.add_argument("--costs", type=float, nargs=3, default=[1, 1, 1], metavar=("F", "I", "W"))
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    options = parser.parse_args()
    costs = dict(zip((F, I, W), options.costs, strict=True))
    worse = 0
    print("P   budget  searched  keeps   best of ours within the budget      zb-v     s")
    for num_workers in options.workers:
        count = 2 * num_workers
        ours = of_ours(num_workers, count, costs)
        zb_v = next(bubble for name, _, bubble in ours if name == "zb-v")
        for budget in options.budgets:
            start = time.perf_counter()
            program = searched_program(num_workers, count, costs, budget * num_workers, options.seconds)
            took = time.perf_counter() - start
            within = [row for row in ours if row[1] <= budget * num_workers * (1 + 1e-9)]
            name, _, best = min(within, key=lambda row: row[2], default=("none", 0.0, 1.0))
            bubble, kept = (1.0, 0.0) if program is None else bubble_of(program, costs)
            worse += bubble > best + 1e-9 or (budget >= 1 and bubble > zb_v + 1e-9)
            print(
                f"{num_workers:<3} {budget:6.2f}  {bubble:8.2%}  {kept / num_workers:5.2f}   {best:7.2%} {name:<26}"
                f"{zb_v:7.2%}  {took:4.1f}",
                flush=True,
            )
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
