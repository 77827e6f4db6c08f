"""A thousand blocks on 64 stages: the processor time of a cut, and how far it is from equal work.

    python -m bench.plan_cut

1F1B with 128 microbatches. Blocks are random; workers are equal or not, links differ, memory is tight, the first block
and the last share a parameter. What takes more than 2 s, or does not fit, ends with exit code 1.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator

from rpc_pipe.dependency import B, F, I, R, U, W
from rpc_pipe.planning.cut_search import CutSearch
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.profile import Chain, LayerCost, Machines, Tie
from rpc_pipe.planning.simulator import Link
from rpc_pipe.planning.specs import make_spec

_BLOCKS, _STAGES, _MICROBATCHES, _MOST_S = 1000, 64, 128, 2.0
#: of wall time, after which the search ends
_CLIMB_S = 1.0


def machines() -> Iterator[tuple[str, Machines]]:
    """Yield workers of several kinds."""
    draw = random.Random(1)
    slow = tuple(draw.choice((1.0, 1.2, 1.5, 2.0)) for _ in range(_STAGES))
    memory = tuple(draw.choice((2500.0, 4000.0, 6500.0)) for _ in range(_STAGES))
    ways = {(a, a + 1): Link(draw.choice((0.1, 1, 5)), 1.0) for a in range(_STAGES - 1)}
    links = {**ways, **{(b, a): way for (a, b), way in ways.items()}}
    yield "equal", Machines(_STAGES)
    yield "unequal", Machines(_STAGES, slow, link=Link(0.1))
    yield "memory", Machines(_STAGES, slow, memory, Link(0.1))
    yield "links", Machines(_STAGES, slow, memory, Link(0.1), links)


def blocks() -> list[LayerCost]:
    """Return random blocks."""
    draw = random.Random(2)
    found = []
    for _ in range(_BLOCKS):
        ms = draw.uniform(1, 3)
        times = {F: ms, B: 2 * ms, I: ms, W: ms, R: ms, U: 0.1 * ms}
        found.append(LayerCost(times, Size(weights=10, activations=5, inputs=1, outputs=1)))
    return found


def main() -> int:
    chain = blocks()
    ties = [Tie(0, _BLOCKS - 1, weights=100, gradients=100, optimizer=200)]
    worse = 0
    print("workers    s   ms a step  above equal work  bytes too much")
    for name, each in machines():
        start = time.process_time()
        spec = make_spec("1f1b", _STAGES, _MICROBATCHES)
        cuts = CutSearch(spec, Chain(chain, ties=ties), each)
        found = cuts.climb(time.monotonic() + _CLIMB_S)
        took = time.process_time() - start
        worse += took > _MOST_S or found.excess > 0
        print(
            f"{name:<8}{took:5.2f}{found.time:11.0f}{found.time / cuts.least - 1:16.1%}{found.excess:15g}", flush=True
        )
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
