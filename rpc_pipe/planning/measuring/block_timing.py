"""Times and bytes of the blocks of a model: measured one by one on this machine, or estimated by their operations.

Blocks run in groups larger than the caches, forwards before backwards, as they do in a stage.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...dependency import B, F, G, I, Kind, R, U, W
from ...workers.compute.parts.tensor_parallel import divisible
from ...workers.compute.shard import LossFn
from ...workers.compute.split_backward import Saved
from ...workers.compute.updating import OptimizerFactory
from ...workers.transport.payload import Tree, pack, tensors_of, unpack
from ..footprint import Size
from ..profile import LayerCost
from .timed_block import TimedBlock, milliseconds, num_bytes, with_working_memory

#: blocks with the same operators count as different if their fastest runs differ by more; autograd does not show all
_SAME = 1.1
#: waits for the other measuring workers
Barrier = Callable[[], None]
#: most bytes of blocks that are measured in turn: with gradients and optimizer state more than caches hold, and small
#: enough to be copied beside a model
_GROUP_BYTES = 2**27
#: side of the square matrices that measure the speed of a device by their product
_MATRIX_SIDE = 512
#: assumed memory bandwidth in bytes a millisecond, for blocks and updates that it limits
_BYTES_A_MS = 4e6


def layer_blocks(
    layers: Sequence[Any],
    inputs: Tree,
    target: Tree = None,
    loss_fn: LossFn | None = None,
    make: Callable[[Any], nn.Module] = lambda layer: layer,
) -> Iterator[TimedBlock]:
    """Yield layers as blocks; each block has to run before the next is made.

    Args:
        make: of a layer, as it is given, the module on its device.
    """
    for i, layer in enumerate(layers):
        module = make(layer)
        loss = (lambda output: loss_fn(output, target)) if i == len(layers) - 1 and loss_fn is not None else None
        run, buffers = partial(_forward, module, inputs, loss, first=i == 0), sum(b.nbytes for b in module.buffers())
        name, named = f"{i} {type(module).__name__}", list(module.named_parameters())
        block = TimedBlock(run, named, name, inputs, buffers)
        block.divided = divisible(module, "", module)
        yield block
        inputs = block.output


def costs_of(
    blocks: Sequence[TimedBlock], optimizer: OptimizerFactory | None, repeats: int, barrier: Barrier = lambda: None
) -> list[LayerCost]:
    """Return the costs of blocks that were timed, with their updates and working memory.

    Args:
        barrier: called before each group of updates is timed.
    """
    found: list[LayerCost] = []
    for first, last in cache_exceeding_groups([block.weights for block in blocks]):
        updates = [_TimedUpdate(block, optimizer) for block in blocks[first:last]]
        for _ in range(repeats):
            barrier()
            for kind in (U, G):
                for update in updates:
                    update.run(kind)
        found += [update.complete() for update in updates]
    return with_working_memory(found, blocks)


def time_blocks(blocks: Sequence[TimedBlock], repeats: int, tell: Callable[[int], None] = lambda done: None) -> None:
    """Time blocks that have run once, which warms up, in `repeats` more runs; report their number after each group.

    All forwards of a group run before its backwards, as in a stage: the processor's caches no longer hold a
    forward's tensors when its backward reads them. A short disturbance then also affects few runs of any block.
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


def scatter(blocks: Sequence[TimedBlock]) -> float:
    """Return the width of the middle half of the runs' times, relative to the median; 0.0 if blocks ran once."""
    runs = [block.runs[kind] for block in blocks for kind in (F, B) if len(block.runs[kind]) > 1]
    lows, middles, highs = map(sum, zip(*(quantiles(took, n=4) for took in runs), strict=True)) if runs else (0, 0, 0)
    return (highs - lows) / middles if middles else 0.0


def _pool_equal(blocks: Sequence[TimedBlock]) -> None:
    """Give blocks that compute the same each other's runs, so that noise in one of them does not decide a cut."""
    groups: defaultdict[Hashable, list[TimedBlock]] = defaultdict(list)
    for block in blocks:
        groups[block.signature].append(block)
    for group in groups.values():
        fastest = [block.fastest for block in group]
        pooled = {kind: [took for block in group for took in block.runs[kind]] for kind in group[0].runs}
        for block in group if max(fastest) <= _SAME * min(fastest) else ():
            block.runs.update(pooled)


def _forward(
    module: nn.Module, inputs: Tree, loss: Callable[[Tree], Tree] | None, first: bool
) -> tuple[list[Tensor], Tree, list[Tensor]]:
    """Return the leaves that get gradients, the input of the next layer, and the roots of backward."""
    tree = unpack(pack(inputs))
    numbers = [t for t in tensors_of(tree) if t.is_floating_point() or t.is_complex()]
    leaves = [tensor for tensor in numbers if tensor.requires_grad or not first]
    for tensor in leaves:
        tensor.requires_grad_()
    output = result = module(tree)
    if loss is not None:
        result, output = loss(output), ()
        result = result[0] if isinstance(result, tuple) else result  # a sum, and its weight
    return leaves, output, [tensor for tensor in tensors_of(result) if tensor.requires_grad]


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
        """Update; or add another replica's gradients, as `Ownership.sum` does."""
        pairs = [(copy.detach(), copy.grad) for _, copy in self._copies if copy.grad is not None]
        if self._optimizer is not None:
            run = self._optimizer.step if kind is U else lambda: [own.clone().add_(other) for own, other in pairs]
            self._times[kind].append(milliseconds(run))

    def complete(self) -> LayerCost:
        """Return the costs of the block with the times of U and G, and all bytes but its working memory."""
        block, cost, state = self._block, self._block.cost, {} if self._optimizer is None else self._optimizer.state
        gradients = sum(parameter.nbytes for _, parameter in block.trained)
        optimizer = sum(t.nbytes for own in state.values() for t in own.values() if isinstance(t, torch.Tensor))
        size = replace(cost.size, weights=block.weights + block.buffers, gradients=gradients, optimizer=optimizer)
        took = {kind: median(times or [0.0]) for kind, times in self._times.items()}
        return replace(cost, times={**cost.times, **took}, size=size)


def operations_a_ms(device: str) -> float:
    """Return the operations a millisecond of a matrix product on the device."""
    a = torch.randn(_MATRIX_SIDE, _MATRIX_SIDE, device=device)
    return 2 * _MATRIX_SIDE**3 / min(milliseconds(lambda: float((a @ a)[0, 0])) for _ in range(4))


def estimated(block: TimedBlock, speed: float, state: float) -> LayerCost:
    """Return the costs of a block from a run of its forward; I and W each take the operations of a forward.

    Args:
        speed: operations a millisecond.
        state: bytes of optimizer state for each byte of parameters.
    """
    block.forward()  # the first run of a stage observes its whole model
    saved = Saved()
    with FlopCounterMode(display=False) as counter, saved.hooks():
        leaves, output, _ = block.forward()
    block.output = unpack(pack(output))
    sent, crossing = block.inputs, num_bytes(output)
    # Storages on the meta device have no address, but an object each.
    own = {parameter.untyped_storage()._cdata for _, parameter in block.named}
    held = {id(handle.tensor): handle.tensor for handle in saved._handles if handle.tensor is not None}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held.values()}
    kept = sum(amount for storage, amount in storages.items() if storage not in own)
    once = max(counter.get_total_flops() / speed, (kept + sent + crossing) / _BYTES_A_MS)
    back = once if leaves else 0.0
    gradients = sum(parameter.nbytes for _, parameter in block.trained)
    times = {F: once, I: back, W: once, B: back + once, R: once}
    times |= {U: (3 + 3 * state) * gradients / _BYTES_A_MS, G: 5 * gradients / _BYTES_A_MS}
    size = Size(block.weights + block.buffers, gradients, state * gradients, kept, kept, sent, crossing)
    return LayerCost(times, size, block.name, block.divided)


def optimizer_ratio(optimizer: OptimizerFactory) -> float:
    """Return the bytes of optimizer state for each byte of parameters, as measured with a small parameter."""
    parameter = nn.Parameter(torch.zeros(4096))
    trial = optimizer([("weight", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    kept = sum(t.nbytes for state in trial.state.values() for t in state.values() if isinstance(t, Tensor))
    return kept / parameter.nbytes
