"""How long updates take, and the bytes that parameters take all the time. Needs torch.

An update walks over parameters, gradients and the optimizer's state, and computes next to nothing: its time is that of
memory. So it is measured as it happens: all blocks in turn, as what a step leaves in the caches is not an update's
alone, and all workers of a host at once, as they share its memory where they share any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dependency import G, U
from ..workers.compute.updating import OptimizerFactory
from .profile import LayerCost

#: lasts until all that was asked of a device is done
Finish = Callable[[], None]
#: told whether this worker goes on, lasts until all workers have told; returns whether all go on
Meet = Callable[[bool], bool]

#: bytes of blocks that are measured in one walk, if a block alone has no more: with gradients and state they are more
#: than caches hold, and copies of them find room beside a model
_WALK = 2**27


class GaveUpError(Exception):
    """Another worker that measures has no memory for it."""


class Resident(NamedTuple):
    """What a block holds all the time."""

    named: Sequence[tuple[str, nn.Parameter]]
    buffers: Sequence[Tensor]
    #: returns those of the parameters that are trained, of one microbatch: an update takes another time for zeros
    gradients: Callable[[], Sequence[Tensor]]

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.named if parameter.requires_grad]

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for _, parameter in self.named)


def with_shards(
    costs: Sequence[LayerCost],
    shards: Sequence[Resident],
    optimizer: OptimizerFactory | None,
    repeats: int = 1,
    finish: Finish = lambda: None,
    meet: Meet = lambda going: going,
) -> list[LayerCost]:
    """Return what blocks cost with what their parameters do: bytes all the time, and the milliseconds of an update.

    Args:
        meet: called before every walk.

    Raises:
        GaveUpError: another worker did.
    """
    found: list[LayerCost] = []
    for first, last in walks([shard.num_bytes for shard in shards]):
        updates = [_Update(shard, optimizer, finish) for shard in shards[first:last]]
        for _ in range(repeats):
            if not meet(True):
                raise GaveUpError
            for update in updates:
                update.step()
            for update in updates:
                update.add()
        pairs = zip(costs[first:last], updates, strict=True)
        found += [update.added_to(cost) for cost, update in pairs]
    return found


def walks(sizes: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of blocks in a row that have as many bytes as a walk may have, or are one block."""
    sums, first = [0, *accumulate(sizes)], 0
    for last in range(1, len(sizes) + 1):
        if last == len(sizes) or sums[last + 1] - sums[first] > _WALK:
            yield first, last
            first = last


class _Update:
    """The update of a block, of copies of its parameters. The first, which makes the state, is not timed."""

    def __init__(self, shard: Resident, optimizer: OptimizerFactory | None, finish: Finish) -> None:
        self._shard, self._finish = shard, finish
        self._took: list[float] = []
        self._added: list[float] = []
        self._copies = [] if optimizer is None else [(n, nn.Parameter(p.detach().clone())) for n, p in shard.trained]
        self._trial = optimizer(self._copies) if optimizer is not None and self._copies else None
        if self._trial is not None:
            for (_, copy), gradient in zip(self._copies, shard.gradients(), strict=True):
                copy.grad = gradient
            self._trial.step()

    def step(self) -> None:
        if self._trial is not None:
            self._took.append(self._time(self._trial.step))

    def add(self) -> None:
        """Sum gradients with those of another replica, as `Updating.sum_gradients` does."""
        pairs = [(copy.detach(), copy.grad) for _, copy in self._copies if copy.grad is not None]
        self._added.append(self._time(lambda: [own.clone().add_(other) for own, other in pairs]))

    def _time(self, run: Callable[[], object]) -> float:
        self._finish()
        begin = time.perf_counter()
        run()
        self._finish()
        return 1e3 * (time.perf_counter() - begin)

    def added_to(self, cost: LayerCost) -> LayerCost:
        shard, state = self._shard, {} if self._trial is None else self._trial.state
        size = replace(
            cost.size,
            weights=shard.num_bytes + sum(buffer.nbytes for buffer in shard.buffers),
            gradients=sum(parameter.nbytes for _, parameter in shard.trained),
            optimizer=sum(t.nbytes for own in state.values() for t in own.values() if isinstance(t, torch.Tensor)),
        )
        took, added = median(self._took or [0.0]), median(self._added or [0.0])
        return replace(cost, times={**cost.times, U: took, G: added}, size=size)
