"""Searched programs against every schedule of ours, at the same activations.

    python -m bench.plan_programs --workers 4 8 --seconds 25

M = 2 P microbatches, F = I = W unless --costs says otherwise, equal stages, links that take no time. For each budget of
activations, in parts of 1F1B's: the bubble of the searched program, that of the best schedule of ours that keeps
within the budget on every worker, and ZB-V's. A program that is worse than one of ours ends with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping

from rpc_pipe.dependency import B, F, I, Kind, R, W, check_all
from rpc_pipe.planning.candidates import candidates
from rpc_pipe.planning.listing import Program, searched_program
from rpc_pipe.planning.simulator import simulate

#: parts of what 1F1B keeps
BUDGETS = (1 / 3, 0.4, 0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 2.0)


def of_ours(num_workers: int, count: int, costs: Mapping[Kind, float]) -> list[tuple[str, float, float]]:
    """Return (name, activations in shares of a worker, bubble) of every schedule, in both orders."""
    found = []
    for candidate in candidates(num_workers, [count], recompute=False, most_stages=16 * num_workers):
        spec = candidate.spec(num_workers)
        if type(spec).recompute:
            continue
        chunks = spec.num_stages / num_workers
        times = {kind: costs.get(kind, 0) / chunks for kind in (F, I, W)}
        times[B] = times[I] + times[W]
        times[R] = times[F]
        run = simulate(spec, lambda action, times=times: times.get(action.kind, 0))  # type: ignore[misc]
        name = f"{candidate.schedule} {','.join(f'{k}={v}' for k, v in candidate.parameters.items())}".strip()
        found.append((name, max(run.peak_activations) / chunks, run.bubble))
    return found


def bubble_of(program: Program, num_workers: int, costs: Mapping[Kind, float]) -> tuple[float, float]:
    """Return the bubble of a program, as the simulator says of the schedule that the checker has proven, and acts."""
    spec = program.schedule(num_workers=num_workers, num_microbatches=len(program.routes))
    check_all(spec)
    chunks = len(program.placement[0]) / num_workers
    run = simulate(spec, lambda action: costs.get(action.kind, 0) / chunks)
    return run.bubble, max(run.peak_activations) / chunks


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
            bubble, kept = (1.0, 0.0) if program is None else bubble_of(program, num_workers, costs)
            worse += bubble > best + 1e-9 or (budget >= 1 and bubble > zb_v + 1e-9)
            print(
                f"{num_workers:<3} {budget:6.2f}  {bubble:8.2%}  {kept / num_workers:5.2f}   {best:7.2%} {name:<26}"
                f"{zb_v:7.2%}  {took:4.1f}",
                flush=True,
            )
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
