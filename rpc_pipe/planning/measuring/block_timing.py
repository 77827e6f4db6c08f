"""Measured times and bytes of the blocks of a model, one by one on this machine.

Blocks run in groups larger than the caches, forwards before backwards, as they do in a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...dependency import B, F, I, Kind, R, W
from ...workers.compute.autograd_graph import children_first
from ...workers.compute.shard import LossFn
from ...workers.compute.split_backward import Saved, WeightBackward, backward_inputs
from ...workers.compute.updating import OptimizerFactory
from ...workers.transport.payload import Tree, pack, tensors_of, unpack
from ..footprint import Size
from ..profile import LayerCost
from .update_times import Barrier, BlockParameters, Synchronize, cache_exceeding_groups, milliseconds, with_update_times
from .working_memory import Forward, begin_gradients, peak_working_bytes

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
    modules, blocks, sizes = list(layers), [], []
    for i, module in enumerate(modules):
        last = i == len(modules) - 1
        loss = (lambda output: loss_fn(output, target)) if last and loss_fn is not None else None

        def forward(
            module: nn.Module = module,
            inputs: Tree = inputs,
            loss: Callable[[Tree], Tree] | None = loss,
            first: bool = i == 0,
        ) -> tuple[list[Tensor], Tree, list[Tensor]]:
            return _forward(module, inputs, loss, first)

        block = TimedBlock(forward, list(module.parameters()), synchronize)
        outputs = block.run()
        blocks.append(block)
        sizes.append((num_bytes(inputs), 0 if loss else num_bytes(outputs)))
        inputs = outputs
    time_blocks(blocks, repeats)
    costs = [LayerCost(block.times, block.kept.size(*ends)) for block, ends in zip(blocks, sizes, strict=True)]
    pairs = zip(modules, blocks, strict=True)
    shards = [BlockParameters(list(m.named_parameters()), list(m.buffers()), block.gradients) for m, block in pairs]
    return with_working_memory(with_update_times(costs, shards, optimizer, repeats, synchronize, barrier), blocks)


class KeptBytes(NamedTuple):
    """Bytes that a block keeps: by F for its backward, by I for W, and the parts of the former in inputs and outputs.

    I keeps, for W of a matrix product, its input and the gradient of its output. So a block of products, norms and
    activation functions keeps about as much after I as before, and less where much is saved for I alone.
    """

    activations: float
    after_inputs: float
    inputs: float
    outputs: float

    def size(self, inputs: float, outputs: float) -> Size:
        """Return the block's size without parameters and working memory."""
        return Size(0, 0, 0, self.activations, self.after_inputs, inputs, outputs, 0, self.inputs, self.outputs)


class TimedBlock:
    """A block with its measured times and kept bytes.

    Args:
        forward: runs it on one microbatch.
        synchronize: waits for the device.
    """

    def __init__(self, forward: Forward, parameters: Sequence[nn.Parameter], synchronize: Synchronize) -> None:
        self.forward = forward
        self.parameters = parameters
        self._synchronize = synchronize
        self._times: dict[Kind, list[float]] = {kind: [] for kind in (F, B, I, W)}
        #: input of the next block
        self._output: Tree = None
        #: what it keeps, of the last run
        self.kept = KeptBytes(0, 0, 0, 0)
        #: names of the operators whose backward it has run, inputs first
        self._operators: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> float:
        """Bytes that it keeps for backward, and of its gradients."""
        return self.kept.activations + sum(parameter.nbytes for parameter in self.parameters)

    @property
    def times(self) -> dict[Kind, float]:
        """The median milliseconds of each kind, without the first run, which warms up."""
        found = {kind: median(took[1:] or took) for kind, took in self._times.items()}
        return {**found, R: found[F]}

    @property
    def signature(self) -> Hashable:
        """What blocks have in common that compute the same, as the layers of a transformer do."""
        shapes = tuple([(parameter.shape, parameter.dtype) for parameter in self.parameters])
        return (self._operators, shapes, self.kept, num_bytes(self._output)) if self._operators else id(self)

    @property
    def fastest(self) -> float:
        """The milliseconds of F and B at their fastest; noise only adds to them."""
        return sum(min(self._times[kind][1:] or self._times[kind]) for kind in (F, B))

    def run(self) -> Tree:
        """Run F, B, F, I and W; return the output, the input of the next block.

        Gradients of weights exist already and are added to, as for all microbatches but the first.
        """
        for _ in self.phases():
            pass
        return self._output

    def phases(self) -> Iterator[None]:
        """Do the same in parts, so that blocks can take turns: F; B; F; I and W; freeing the gradients."""
        trained = begin_gradients(self.parameters)
        found: list[tuple[list[Tensor], Tree, list[Tensor]]] = []
        self._time(F, lambda: found.append(self.forward()))
        yield
        roots = found.pop()[2]
        if roots:
            self._time(B, lambda: torch.autograd.backward(roots, [torch.ones_like(root) for root in roots]))
        else:
            self._times[B].append(0)
        del roots
        yield
        saved = Saved()
        with saved.hooks():
            leaves, output, roots = self.forward()
        yield
        self._operators = tuple(
            [node.name() for node in children_first(root.grad_fn for root in roots if root.grad_fn)]
        )
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.parameters}
        held = saved.num_bytes(weights)
        own = {leaf.untyped_storage().data_ptr() for leaf in leaves} - weights
        made = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(output)} - weights
        kept = saved.num_bytes_at(own), saved.num_bytes_at(made)
        deferred: list[WeightBackward] = []
        self._output = unpack(pack(output))
        del output
        self._time(I, lambda: deferred.append(backward_inputs(roots, [None] * len(roots), leaves, saved)[1]))
        self.kept = KeptBytes(held, saved.num_bytes(weights) + deferred[0].num_bytes(), *kept)
        self._time(W, deferred[0].run)
        yield
        for parameter in trained:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the trained parameters for one microbatch."""
        trained = begin_gradients(self.parameters)
        roots = self.forward()[2]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        found = [parameter.grad for parameter in trained if parameter.grad is not None]
        for parameter in trained:
            parameter.grad = None
        return found

    def _time(self, kind: Kind, run: Callable[[], object]) -> None:
        self._times[kind].append(milliseconds(run, self._synchronize))


def time_blocks(blocks: Sequence[TimedBlock], repeats: int, tell: Callable[[int], None] = lambda done: None) -> None:
    """Run blocks, which have run once, `repeats` times more; `tell` the number of runs after each group.

    All forwards of a group run before its backwards, as in a stage: what a forward has left in the caches is gone when
    its backward reads it. A short disturbance of the machine then also affects few runs of any block.
    """
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
            runs = {kind: [took for block in group for took in block._times[kind][1:]] for kind in (F, B, I, W)}
            for block in group:
                block._times = {kind: [*took[:1], *runs[kind]] for kind, took in block._times.items()}


def with_working_memory(costs: Sequence[LayerCost], blocks: Sequence[TimedBlock]) -> list[LayerCost]:
    """Return the costs of blocks with the bytes that they allocate while they run, besides what they keep."""
    found = []
    runs = [(block.forward, block.parameters) for block in blocks]
    for cost, peaks in zip(costs, peak_working_bytes(runs), strict=True):
        forward = peaks[0] - (cost.size.activations - cost.size.kept_inputs)
        found.append(replace(cost, size=replace(cost.size, working=max(0.0, forward, *peaks[1:]))))
    return found


def _forward(
    module: nn.Module, inputs: Tree, loss: Callable[[Tree], Tree] | None, first: bool
) -> tuple[list[Tensor], Tree, list[Tensor]]:
    """Return the leaves whose gradients backward computes, the layer's output, and the roots of backward."""
    tree = unpack(pack(inputs))
    leaves = [
        tensor for tensor in tensors_of(tree) if tensor.requires_grad or (not first and _is_differentiable(tensor))
    ]
    for tensor in leaves:
        tensor.requires_grad_()
    output = module(tree)
    result = output if loss is None else loss(output)
    if loss is not None and isinstance(result, tuple):
        result = result[0]  # a sum, and its weight
    return leaves, output, [tensor for tensor in tensors_of(result) if tensor.requires_grad]


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def num_bytes(tree: Tree) -> int:
    """Return the bytes of the tensors of a tree."""
    return sum(tensor.nbytes for tensor in tensors_of(tree))
