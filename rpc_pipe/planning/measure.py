"""Time and bytes of every layer of a model, measured one by one on this machine: what plans are made from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dependency import B, F, G, I, Kind, R, U, W
from ..workers.compute.shard import LossFn
from ..workers.compute.split_backward import Deferred, Saved, backward_inputs
from ..workers.compute.updating import OptimizerFactory
from ..workers.transport.payload import Tree, pack, tensors_of, unpack
from .footprint import Size
from .profile import LayerCost
from .weighing import Forward, weigh

#: lasts until all that was asked of a device is done
Finish = Callable[[], None]


def measure(
    layers: Iterable[nn.Module],
    inputs: Tree,
    *,
    target: Tree = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerFactory | None = None,
    repeats: int = 5,
    finish: Finish = lambda: None,
) -> list[LayerCost]:
    """Measure each layer of a model on one microbatch.

    Args:
        layers: in order, each fed with the output of the one before; the first owes a gradient if its inputs do.
        target: with `loss_fn` the loss counts to the last layer.
        repeats: how often each is timed; the median counts.
        finish: waits for the device.
    """
    modules, costs, runs = list(layers), [], []
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

        parameters = list(module.named_parameters())
        own = [p for _, p in parameters]
        times, kept, outputs = time_block(forward, own, repeats, finish)
        crossing = 0 if loss else num_bytes(outputs)
        size = kept.size(num_bytes(inputs), crossing)
        runs.append((forward, own))
        costs.append(with_shard(LayerCost(times, size), parameters, list(module.buffers()), optimizer, repeats))
        inputs = outputs
    return with_working(costs, runs)


class Kept(NamedTuple):
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


def time_block(
    forward: Forward, parameters: Sequence[nn.Parameter], repeats: int, finish: Finish
) -> tuple[dict[Kind, float], Kept, Tree]:
    """Return a block's milliseconds by kind, what it keeps, and its output."""
    times: dict[Kind, list[float]] = {kind: [] for kind in (F, B, I, W)}
    for _ in range(repeats + 1):  # the first warms up
        kept, output = _once(forward, parameters, times, finish)
    found = {kind: 1e3 * median(ts[1:]) for kind, ts in times.items()}
    return {**found, R: found[F]}, kept, output


def _once(
    forward: Forward, parameters: Sequence[nn.Parameter], times: dict[Kind, list[float]], finish: Finish
) -> tuple[Kept, Tree]:
    """Run backward in one piece and then in two; return the bytes kept, and the output for the next block."""

    def timed(kind: Kind, run: Callable[[], object]) -> None:
        finish()
        begin = time.perf_counter()
        run()
        finish()
        times[kind].append(time.perf_counter() - begin)

    found: list[tuple[list[Tensor], Tree, list[Tensor]]] = []
    timed(F, lambda: found.append(forward()))
    roots = found.pop()[2]
    if roots:
        timed(B, lambda: torch.autograd.backward(roots, [torch.ones_like(root) for root in roots]))
    else:
        times[B].append(0)

    saved = Saved()
    with saved.hooks():
        owing, output, roots = forward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    held = saved.num_bytes(weights)
    own = {leaf.untyped_storage().data_ptr() for leaf in owing} - weights
    made = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(output)} - weights
    kept = saved.num_bytes_at(own), saved.num_bytes_at(made)
    deferred: list[Deferred] = []
    output = unpack(pack(output))
    timed(I, lambda: deferred.append(backward_inputs(roots, [None] * len(roots), owing, saved)[1]))
    after = saved.num_bytes(weights) + deferred[0].num_bytes()
    timed(W, deferred[0].run)
    for parameter in parameters:
        parameter.grad = None
    return Kept(held, after, *kept), output


def with_working(costs: Sequence[LayerCost], runs: Sequence[tuple[Forward, Sequence[nn.Parameter]]]) -> list[LayerCost]:
    """Return what blocks cost with what they need while they run, besides what they keep: all that is allocated."""
    found = []
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


def with_shard(
    cost: LayerCost,
    parameters: Sequence[tuple[str, nn.Parameter]],
    buffers: Sequence[Tensor],
    optimizer: OptimizerFactory | None,
    repeats: int = 1,
) -> LayerCost:
    """Return what a block costs with what its parameters do: bytes all the time, and the milliseconds of an update."""
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    kept, took, added = 0, [0.0], 0.0
    if optimizer is not None and trained:
        copies = [(name, nn.Parameter(torch.zeros_like(p))) for name, p in trained]
        trial = optimizer(copies)
        took = []
        for _ in range(1 + repeats):  # the first makes the state
            for _, copy in copies:
                copy.grad = torch.zeros_like(copy)
            begin = time.perf_counter()
            trial.step()
            took.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _, copy in copies:
            copy.detach().add_(torch.zeros_like(copy))
        added = 1e3 * (time.perf_counter() - begin)
        kept = sum(t.nbytes for state in trial.state.values() for t in state.values() if isinstance(t, Tensor))
    size = replace(
        cost.size,
        weights=sum(t.nbytes for t in (*(p for _, p in parameters), *buffers)),
        gradients=sum(p.nbytes for _, p in trained),
        optimizer=kept,
    )
    return replace(cost, times={**cost.times, U: 1e3 * median(took[1:] or took), G: added}, size=size)
