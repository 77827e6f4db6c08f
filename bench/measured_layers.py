"""Measured costs of layers, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from rpc_pipe.planning.measuring.block_timing import costs_of, layer_blocks, time_blocks
from rpc_pipe.planning.profile import LayerCost


def measure_layers(
    layers: Iterable[nn.Module],
    inputs: Any,
    *,
    target: Any = None,
    loss_fn: Any = None,
    optimizer: Any = None,
    repeats: int = 5,
    barrier: Callable[[], None] = lambda: None,
) -> list[LayerCost]:
    """Measure each layer of a model on one microbatch.

    Args:
        layers: in order; each gets the output of the one before. The first computes a gradient of its inputs only if
            they require one.
        target: of `loss_fn`, whose cost is added to the last layer's.
        repeats: how often each is timed; the result is the median.
        barrier: waits for the other measuring workers, so that all update at once.
    """
    blocks = []
    for block in layer_blocks(list(layers), inputs, target, loss_fn):
        block.run()
        blocks.append(block)
    time_blocks(blocks, repeats)
    return costs_of(blocks, optimizer, repeats, barrier)
