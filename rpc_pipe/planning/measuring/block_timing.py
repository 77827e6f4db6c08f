"""Measured times and bytes of the blocks of a model, one by one on this machine.

Blocks run in groups larger than the caches, forwards before backwards, as they do in a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...workers.compute.shard import LossFn
from ...workers.compute.updating import OptimizerFactory
from ...workers.transport.payload import Tree, pack, tensors_of, unpack
from ..profile import LayerCost
from .timed_block import Synchronize, TimedBlock, with_working_memory
from .update_times import Barrier, cache_exceeding_groups, with_update_times

#: blocks of the same operators whose fastest runs differ by more do something else that autograd does not show
_SAME = 1.1


def measure_layers(
    layers: Iterable[nn.Module],
    inputs: Tree,
    *,
    target: Tree = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerFactory | None = None,
    repeats: int = 5,
    synchronize: Synchronize = lambda: None,
    barrier: Barrier = lambda going: going,
) -> list[LayerCost]:
    """Measure each layer of a model on one microbatch.

    Args:
        layers: in order; each gets the output of the one before. The first computes a gradient of its inputs only if
            they require one.
        target: of `loss_fn`, whose cost is added to the last layer's.
        repeats: how often each is timed; the result is the median.
        synchronize: waits for the device.
        barrier: waits for the other measuring workers, so that all update at once.

    Raises:
        PeerOutOfMemoryError: another worker has too little memory.
    """
    blocks = []
    for block in layer_blocks(list(layers), inputs, target, loss_fn, synchronize):
        block.run()
        blocks.append(block)
    time_blocks(blocks, repeats)
    return costs_of(blocks, optimizer, repeats, barrier)


def layer_blocks(
    layers: Sequence[Any],
    inputs: Tree,
    target: Tree,
    loss_fn: LossFn | None,
    synchronize: Synchronize = lambda: None,
    make: Callable[[Any], nn.Module] = lambda layer: layer,
) -> Iterator[TimedBlock]:
    """Yield layers as blocks, each of which has to run before the next.

    Args:
        make: of a layer, as it is given, the module on its device.
    """
    for i, layer in enumerate(layers):
        module = make(layer)
        loss = (lambda output: loss_fn(output, target)) if i == len(layers) - 1 and loss_fn is not None else None
        run, buffers = partial(_forward, module, inputs, loss, first=i == 0), sum(b.nbytes for b in module.buffers())
        block = TimedBlock(
            run, list(module.named_parameters()), synchronize, f"{i} {type(module).__name__}", inputs, buffers
        )
        yield block
        inputs = block.output


def costs_of(
    blocks: Sequence[TimedBlock], optimizer: OptimizerFactory | None, repeats: int, barrier: Barrier
) -> list[LayerCost]:
    """Return the costs of blocks that were timed, with their updates and working memory."""
    costs = with_update_times([block.cost for block in blocks], blocks, optimizer, repeats, barrier)
    return with_working_memory(costs, blocks)


def time_blocks(blocks: Sequence[TimedBlock], repeats: int, tell: Callable[[int], None] = lambda done: None) -> None:
    """Time blocks that have run once, which warms up, in `repeats` more runs; `tell` their number after each group.

    All forwards of a group run before its backwards, as in a stage: what a forward has left in the caches is gone when
    its backward reads it. A short disturbance of the machine then also affects few runs of any block.
    """
    for block in blocks:
        block.runs.clear()
    for round_ in range(repeats):
        for first, last in cache_exceeding_groups([block.num_bytes for block in blocks]):
            parts = [block.phases() for block in blocks[first:last]]
            for way in (1, -1, 1, -1, 1):
                for part in parts[::way]:
                    next(part, None)
            tell(round_ * len(blocks) + last)
    _pool_equal(blocks)


def _pool_equal(blocks: Sequence[TimedBlock]) -> None:
    """Give blocks that compute the same each other's runs, so that noise in one of them does not decide a cut."""
    groups: defaultdict[Hashable, list[TimedBlock]] = defaultdict(list)
    for block in blocks:
        groups[block.signature].append(block)
    for group in groups.values():
        fastest = [block.fastest for block in group]
        if max(fastest) <= _SAME * min(fastest):
            pooled = {kind: [took for block in group for took in block.runs[kind]] for kind in group[0].runs}
            for block in group:
                block.runs.update(pooled)


def _forward(
    module: nn.Module, inputs: Tree, loss: Callable[[Tree], Tree] | None, first: bool
) -> tuple[list[Tensor], Tree, list[Tensor]]:
    """Return the leaves whose gradients backward computes, what goes to the next layer, and the roots of backward."""
    tree = unpack(pack(inputs))
    leaves = [
        t for t in tensors_of(tree) if t.requires_grad or (not first and (t.is_floating_point() or t.is_complex()))
    ]
    for tensor in leaves:
        tensor.requires_grad_()
    output = module(tree)
    if loss is None:
        return leaves, output, [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    result = loss(output)
    summed = result[0] if isinstance(result, tuple) else result  # a sum, and its weight
    return leaves, (), [tensor for tensor in tensors_of(summed) if tensor.requires_grad]
