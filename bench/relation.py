"""How fast schedules are compiled and priced: actions a second, of one process. `python bench/relation.py`

A planner compiles a relation once and prices it a thousand times, so the two are told apart.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial

from rpc_pipe.dependency import B, F, I, Order, W
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.schedules import SCHEDULES

_COST = uniform({F: 1, B: 2, I: 1, W: 1})
_ORDERS: tuple[Order, ...] = ("fixed", "ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3, help="of which the fastest counts")
    parsed = parser.parse_args()
    timings: list[tuple[Order, int]] = [(order, comm) for order in _ORDERS for comm in (0, 1)]
    heads = [f"{order}, travel {comm}" for order, comm in timings]
    print(f"{'schedule':<14}{'built':>10}" + "".join(f"{head:>18}" for head in heads))
    for name in ("1f1b", "zb-h1", "zb-v", "interleaved", "chimera", "varuna"):
        spec = SCHEDULES[name](num_workers=parsed.workers, num_microbatches=parsed.microbatches)
        relation = Relation(spec)
        taken = [_fastest(parsed.repeat, partial(Relation, spec))]
        for order, comm in timings:
            taken.append(_fastest(parsed.repeat, partial(simulate, relation, _COST, order=order, comm=comm)))
        rates = [f"{len(relation.actions) / seconds:,.0f}" for seconds in taken]
        print(f"{name:<14}{rates[0]:>10}" + "".join(f"{rate:>18}" for rate in rates[1:]))


def _fastest(times: int, call: Callable[[], object]) -> float:
    """Return the seconds of processor time of the fastest of several calls."""
    seconds = []
    for _ in range(times):
        gc.collect()
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)


if __name__ == "__main__":
    main()
