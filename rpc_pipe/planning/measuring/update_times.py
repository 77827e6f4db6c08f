"""Measured times of updates, and the bytes of parameters, gradients and optimizer state. Needs torch.

An update reads and writes parameters, gradients and optimizer state and computes next to nothing, so memory bandwidth
is its time. It is measured under the conditions of training: blocks in turn, whose data together exceed the caches,
and all workers of a host at once, which share its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median

import torch
from torch import nn

from ...dependency import G, Kind, U
from ...workers.compute.updating import OptimizerFactory
from ..profile import LayerCost
from .timed_block import TimedBlock, milliseconds

#: waits for the other measuring workers; takes whether this worker goes on, returns whether all do
Barrier = Callable[[bool], bool]

#: most bytes of blocks that are measured in turn: with gradients and optimizer state more than caches hold, and small
#: enough to be copied beside a model
_GROUP_BYTES = 2**27


class PeerOutOfMemoryError(Exception):
    """Another measuring worker has too little memory."""


def with_update_times(
    costs: Sequence[LayerCost],
    blocks: Sequence[TimedBlock],
    optimizer: OptimizerFactory | None,
    repeats: int = 1,
    barrier: Barrier = lambda going: going,
) -> list[LayerCost]:
    """Return the costs of blocks with the times of U and G, and the bytes of weights, gradients and optimizer state.

    Args:
        barrier: called before each group of updates is timed.

    Raises:
        PeerOutOfMemoryError: another worker has given up.
    """
    found: list[LayerCost] = []
    for first, last in cache_exceeding_groups([block.weights for block in blocks]):
        updates = [_TimedUpdate(block, optimizer) for block in blocks[first:last]]
        for _ in range(repeats):
            if not barrier(True):
                raise PeerOutOfMemoryError
            for kind in (U, G):
                for update in updates:
                    update.run(kind)
        found += [update.complete(cost) for cost, update in zip(costs[first:last], updates, strict=True)]
    return found


def cache_exceeding_groups(sizes: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of groups of blocks in a row, each of at most `_GROUP_BYTES` or of one block."""
    sums, first = [0, *accumulate(sizes)], 0
    for last in range(1, len(sizes) + 1):
        if last == len(sizes) or sums[last + 1] - sums[first] > _GROUP_BYTES:
            yield first, last
            first = last


class _TimedUpdate:
    """A block's update, timed on copies of its parameters. The first, which allocates the state, is not timed."""

    def __init__(self, block: TimedBlock, optimizer: OptimizerFactory | None) -> None:
        self._block = block
        self._times: dict[Kind, list[float]] = {U: [], G: []}
        self._copies = [] if optimizer is None else [(n, nn.Parameter(p.detach().clone())) for n, p in block.trained]
        self._optimizer = optimizer(self._copies) if optimizer is not None and self._copies else None
        if self._optimizer is not None:
            for (_, copy), gradient in zip(self._copies, block.gradients(), strict=True):
                copy.grad = gradient
            self._optimizer.step()

    def run(self, kind: Kind) -> None:
        """Update; or sum gradients with those of another replica, as `Pieces.sum` does."""
        pairs = [(copy.detach(), copy.grad) for _, copy in self._copies if copy.grad is not None]
        if self._optimizer is not None:
            run = self._optimizer.step if kind is U else lambda: [own.clone().add_(other) for own, other in pairs]
            self._times[kind].append(milliseconds(run, self._block.synchronize))

    def complete(self, cost: LayerCost) -> LayerCost:
        block, state = self._block, {} if self._optimizer is None else self._optimizer.state
        size = replace(
            cost.size,
            weights=block.weights + block.buffers,
            gradients=sum(parameter.nbytes for _, parameter in block.trained),
            optimizer=sum(t.nbytes for own in state.values() for t in own.values() if isinstance(t, torch.Tensor)),
        )
        took = {kind: median(times or [0.0]) for kind, times in self._times.items()}
        return replace(cost, times={**cost.times, **took}, size=size)
