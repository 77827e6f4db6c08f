"""Time and bytes of every layer of a model, measured one by one on this machine: what plans are made from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..dependency import B, F, I, Kind, R, W
from ..workers.compute.shard import LossFn, OptimizerFactory
from ..workers.compute.split_backward import Saved, backward_inputs
from ..workers.transport.payload import Tree, pack, tensors_of, unpack
from .footprint import Size
from .profile import LayerCost


def measure(
    layers: Iterable[nn.Module],
    inputs: Tree,
    *,
    target: Tree = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerFactory | None = None,
    repeats: int = 5,
) -> list[LayerCost]:
    """Measure each layer of a model on one microbatch.

    Args:
        layers: in order, each fed with the output of the one before.
        target: with `loss_fn` the loss counts to the last layer.
        repeats: how often each is timed; the median counts.
    """
    modules, costs = list(layers), []
    for i, module in enumerate(modules):
        last = i == len(modules) - 1
        loss = (lambda output: loss_fn(output, target)) if last and loss_fn is not None else None
        times: dict[Kind, list[float]] = {kind: [] for kind in (F, B, I, W)}
        for _ in range(repeats + 1):  # the first warms up
            outputs, size = _once(module, inputs, loss, times)
        costs.append(LayerCost(_medians(times), _with_shard(size, module, optimizer)))
        inputs = outputs
    return costs


def _medians(times: dict[Kind, list[float]]) -> dict[Kind, float]:
    found = {kind: 1e3 * sorted(ts[1:])[len(ts[1:]) // 2] for kind, ts in times.items()}
    return {**found, R: found[F]}


def _once(
    module: nn.Module, inputs: Tree, loss: Callable[[Tree], Tree] | None, times: dict[Kind, list[float]]
) -> tuple[Tree, Size]:
    """Run backward in one piece and then in two; return the output for the next layer and the bytes."""
    begin = time.perf_counter()
    _, _, roots = _forward(module, inputs, loss)
    middle = time.perf_counter()
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    times[F].append(middle - begin)
    times[B].append(time.perf_counter() - middle)

    saved = Saved()
    with saved.hooks():
        owing, output, roots = _forward(module, inputs, loss)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    held = saved.num_bytes(weights)
    begin = time.perf_counter()
    _, deferred = backward_inputs(roots, [None] * len(roots), owing, saved)
    middle = time.perf_counter()
    after = saved.num_bytes(weights)
    deferred.run()
    times[I].append(middle - begin)
    times[W].append(time.perf_counter() - middle)
    module.zero_grad()
    outputs = 0 if loss is not None else _num_bytes(output)
    return unpack(pack(output)), Size(activations=held, after_inputs=after, inputs=_num_bytes(inputs), outputs=outputs)


def _forward(
    module: nn.Module, inputs: Tree, loss: Callable[[Tree], Tree] | None
) -> tuple[list[Tensor], Tree, list[Tensor]]:
    """Return the leaves that owe a gradient, the layer's output, and what backward starts from."""
    tree = unpack(pack(inputs))
    owing = [tensor.requires_grad_() for tensor in tensors_of(tree) if tensor.is_floating_point()]
    output = module(tree)
    result = output if loss is None else loss(output)
    if loss is not None and isinstance(result, tuple):
        result = result[0]  # a sum, and its weight
    return owing, output, [tensor for tensor in tensors_of(result) if tensor.requires_grad]


def _num_bytes(tree: Tree) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(tree))


def _with_shard(size: Size, module: nn.Module, optimizer: OptimizerFactory | None) -> Size:
    parameters = list(module.parameters())
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    trained = [p for _, p in named]
    kept = 0
    if optimizer is not None and trained:
        trial = optimizer([(name, nn.Parameter(torch.zeros_like(p))) for name, p in named])
        for group in trial.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        trial.step()
        kept = sum(t.nbytes for state in trial.state.values() for t in state.values() if isinstance(t, Tensor))
    return replace(
        size,
        weights=sum(t.nbytes for t in (*parameters, *module.buffers())),
        gradients=sum(p.nbytes for p in trained),
        optimizer=kept,
    )
