"""Time and bytes of every layer of a model, measured one by one on this machine: what plans are made from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dependency import B, F, I, Kind, R, W
from ..workers.compute.shard import LossFn
from ..workers.compute.split_backward import Saved, WeightBackward, backward_inputs
from ..workers.compute.updating import OptimizerFactory
from ..workers.transport.payload import Tree, pack, tensors_of, unpack
from .footprint import Size
from .profile import LayerCost
from .update_times import Finish, Meet, Resident, walks, with_shards
from .working_memory import Forward, begin_gradients, weigh


def measure(
    layers: Iterable[nn.Module],
    inputs: Tree,
    *,
    target: Tree = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerFactory | None = None,
    repeats: int = 5,
    finish: Finish = lambda: None,
    meet: Meet = lambda going: going,
) -> list[LayerCost]:
    """Measure each layer of a model on one microbatch.

    Args:
        layers: in order, each fed with the output of the one before; the first owes a gradient if its inputs do.
        target: with `loss_fn` the loss counts to the last layer.
        repeats: how often each is timed; the median counts.
        finish: waits for the device.
        meet: waits for the other workers that measure, before all update at once.

    Raises:
        GaveUpError: another worker has no memory for it.
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

        block = TimedBlock(forward, list(module.parameters()), finish)
        outputs = block.run()
        blocks.append(block)
        sizes.append((num_bytes(inputs), 0 if loss else num_bytes(outputs)))
        inputs = outputs
    time_blocks(blocks, repeats)
    costs = [LayerCost(block.times, block.kept.size(*ends)) for block, ends in zip(blocks, sizes, strict=True)]
    pairs = zip(modules, blocks, strict=True)
    shards = [Resident(list(m.named_parameters()), list(m.buffers()), block.gradients) for m, block in pairs]
    return with_working(with_shards(costs, shards, optimizer, repeats, finish, meet), blocks)


class KeptBytes(NamedTuple):
    """Bytes that are kept for backward: by forward, by I for W, and of the former what are inputs and outputs.

    For W of a matrix product I keeps its input and the gradient of its output. So a stage of products, norms and
    activation functions keeps about as much after I as before; less where much is saved for what I does alone.
    """

    activations: float
    after_inputs: float
    inputs: float
    outputs: float

    def size(self, inputs: float, outputs: float) -> Size:
        """Return the size of a block, less what its parameters are all the time, and what it needs while it runs."""
        return Size(0, 0, 0, self.activations, self.after_inputs, inputs, outputs, 0, self.inputs, self.outputs)


class TimedBlock:
    """A block that is run and timed.

    Args:
        forward: runs it on one microbatch.
        finish: waits for the device.
    """

    def __init__(self, forward: Forward, parameters: Sequence[nn.Parameter], finish: Finish) -> None:
        self.forward = forward
        self.parameters = parameters
        self._finish = finish
        self._took: dict[Kind, list[float]] = {kind: [] for kind in (F, B, I, W)}
        #: for the next block
        self._output: Tree = None
        #: what it keeps, as last seen
        self.kept = KeptBytes(0, 0, 0, 0)

    @property
    def num_bytes(self) -> float:
        """Of what it keeps for backward, and of gradients, while it runs with others."""
        return self.kept.activations + sum(parameter.nbytes for parameter in self.parameters)

    @property
    def times(self) -> dict[Kind, float]:
        """The median milliseconds of each kind; of the first run, which warms up, nothing counts."""
        found = {kind: 1e3 * median(took[1:] or took) for kind, took in self._took.items()}
        return {**found, R: found[F]}

    def run(self) -> Tree:
        """Run forward, backward in one piece, and then in two; return the output, for the next block.

        Gradients of weights are there already and are added to, as in all microbatches but the first.
        """
        for _ in self.phases():
            pass
        return self._output

    def phases(self) -> Iterator[None]:
        """Do the same in parts: forward, backward, forward, backward in two, and what is left to be forgotten."""
        trained = begin_gradients(self.parameters)
        found: list[tuple[list[Tensor], Tree, list[Tensor]]] = []
        self._time(F, lambda: found.append(self.forward()))
        yield
        roots = found.pop()[2]
        if roots:
            self._time(B, lambda: torch.autograd.backward(roots, [torch.ones_like(root) for root in roots]))
        else:
            self._took[B].append(0)
        del roots
        yield
        saved = Saved()
        with saved.hooks():
            owing, output, roots = self.forward()
        yield
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.parameters}
        held = saved.num_bytes(weights)
        own = {leaf.untyped_storage().data_ptr() for leaf in owing} - weights
        made = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(output)} - weights
        kept = saved.num_bytes_at(own), saved.num_bytes_at(made)
        deferred: list[WeightBackward] = []
        self._output = unpack(pack(output))
        del output
        self._time(I, lambda: deferred.append(backward_inputs(roots, [None] * len(roots), owing, saved)[1]))
        self.kept = KeptBytes(held, saved.num_bytes(weights) + deferred[0].num_bytes(), *kept)
        self._time(W, deferred[0].run)
        yield
        for parameter in trained:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Return those of the parameters that are trained, of one microbatch."""
        trained = begin_gradients(self.parameters)
        roots = self.forward()[2]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        found = [parameter.grad for parameter in trained if parameter.grad is not None]
        for parameter in trained:
            parameter.grad = None
        return found

    def _time(self, kind: Kind, run: Callable[[], object]) -> None:
        self._finish()
        begin = time.perf_counter()
        run()
        self._finish()
        self._took[kind].append(time.perf_counter() - begin)


def time_blocks(blocks: Sequence[TimedBlock], repeats: int, tell: Callable[[int], None] = lambda done: None) -> None:
    """Run blocks, which have run once, so many times more; `tell` how often one of them has.

    All forwards of a row of blocks, then all backwards, as in a stage: what a block has left in a processor's caches is
    gone when its backward reads it. And what disturbs the machine for a moment disturbs few runs of each.
    """
    for round_ in range(repeats):
        for first, last in walks([block.num_bytes for block in blocks]):
            parts = [block.phases() for block in blocks[first:last]]
            for way in (1, -1, 1, -1, 1):
                for part in parts[::way]:
                    next(part, None)
            tell(round_ * len(blocks) + last)


def with_working(costs: Sequence[LayerCost], blocks: Sequence[TimedBlock]) -> list[LayerCost]:
    """Return what blocks cost with what they need while they run, besides what they keep: all that is allocated."""
    found = []
    runs = [(block.forward, block.parameters) for block in blocks]
    for cost, peaks in zip(costs, weigh(runs), strict=True):
        forward = peaks[0] - (cost.size.activations - cost.size.kept_inputs)
        found.append(replace(cost, size=replace(cost.size, working=max(0.0, forward, *peaks[1:]))))
    return found


def _forward(
    module: nn.Module, inputs: Tree, loss: Callable[[Tree], Tree] | None, first: bool
) -> tuple[list[Tensor], Tree, list[Tensor]]:
    """Return the leaves that owe a gradient, the layer's output, and what backward starts from."""
    tree = unpack(pack(inputs))
    owing = [tensor for tensor in tensors_of(tree) if tensor.requires_grad or (not first and _may_owe(tensor))]
    for tensor in owing:
        tensor.requires_grad_()
    output = module(tree)
    result = output if loss is None else loss(output)
    if loss is not None and isinstance(result, tuple):
        result = result[0]  # a sum, and its weight
    return owing, output, [tensor for tensor in tensors_of(result) if tensor.requires_grad]


def _may_owe(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def num_bytes(tree: Tree) -> int:
    """Return the bytes of the tensors of a tree."""
    return sum(tensor.nbytes for tensor in tensors_of(tree))
