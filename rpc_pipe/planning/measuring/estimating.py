"""Estimated costs of a model that is too large to run: its operations are counted on the meta device. Needs torch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from ...dependency import B, F, G, I, R, U, W
from ...model.user_model import UserModel
from ...workers.compute.split_backward import Saved
from ...workers.compute.torch_internals import OperatorMode
from ...workers.compute.updating import OptimizerFactory
from ...workers.transport.payload import Tree, map_tensors, tensors_of
from ..footprint import Size
from ..profile import LayerCost
from .timed_block import num_bytes

#: side of the square matrices by whose product the speed of a device is measured
_MATRIX_SIDE = 512
#: assumed memory bandwidth in bytes a millisecond, for blocks and updates that it limits
_BYTES_A_MS = 4e6


class _OperationCounter(OperatorMode):
    """Counts the operations of products and convolutions, like torch's mode, which needs modules besides."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def operations_a_ms(device: str) -> float:
    """Return the operations a millisecond of a matrix product on the device."""
    a = torch.randn(_MATRIX_SIDE, _MATRIX_SIDE, device=device)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - begin)
    return 2 * _MATRIX_SIDE**3 / (1e3 * best)


def estimate_layers(user_model: UserModel, batch: Tree, speed: float, optimizer: OptimizerFactory) -> list[LayerCost]:
    """Estimate each layer of a list. `speed` in operations a millisecond."""
    inputs, target = user_model.pair(map_tensors(batch, lambda tensor: tensor.to("meta")))
    costs: list[LayerCost] = []
    layers = user_model.layers()
    for i, made_layer in enumerate(layers):
        with torch.device("meta"):
            layer = made_layer if isinstance(made_layer, nn.Module) else made_layer()
        layer = copy.deepcopy(layer).to("meta")
        leaves = [tensor.requires_grad_() for tensor in tensors_of(inputs) if i and tensor.is_floating_point()]
        last = i == len(layers) - 1

        def run(layer: nn.Module = layer, inputs: Tree = inputs, last: bool = last) -> Tree:
            outputs = layer(inputs)
            if last and user_model.loss_fn is not None:
                user_model.loss_fn(outputs, target)
            return outputs

        block = f"{i} {type(layer).__name__}", list(layer.named_parameters())
        cost, outputs = _estimate(run, inputs, *block, speed, optimizer, bool(leaves), last)
        costs.append(cost)
        inputs = map_tensors(outputs, lambda tensor: tensor.detach())
    return costs


def estimate_whole(user_model: UserModel, batch: Tree, speed: float, optimizer: OptimizerFactory) -> list[LayerCost]:
    """Estimate each block of any other model. The blocks run one at a time, with uninitialised weights."""
    args, kwargs = user_model.call(batch)
    observed = user_model.observe(args, kwargs)
    cut = [range(i, i + 1) for i in range(observed.num_blocks)]
    payload: Sequence[Tensor] = ()
    costs = []
    for i, block in enumerate(observed.blocks):
        stage = observed.build(i, cut, initialise=False)
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in payload]
        run = partial(stage.forward, leaves, args, kwargs)
        run()  # the first run observes the whole model
        named = list(stage.named_parameters())
        cost, payload = _estimate(run, payload, block.name, named, speed, optimizer, i > 0, i == len(cut) - 1)
        costs.append(cost)
    return costs


def _estimate(
    run: Callable[[], Any],
    inputs: Tree,
    name: str,
    named: Sequence[tuple[str, nn.Parameter]],
    speed: float,
    optimizer: OptimizerFactory,
    has_input_gradient: bool,
    last: bool,
) -> tuple[LayerCost, Any]:
    """Return the costs of a block, and its outputs; I and W take as many operations each as its forward."""
    saved = Saved()
    with _OperationCounter() as counter, saved.hooks():
        outputs = run()
    sent, crossing = num_bytes(inputs), 0 if last else num_bytes(outputs)
    # Storages on the meta device have no address, but an object each.
    own = {parameter.untyped_storage()._cdata for _, parameter in named}
    held = {id(handle.tensor): handle.tensor for handle in saved._handles if handle.tensor is not None}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held.values()}
    kept = sum(amount for storage, amount in storages.items() if storage not in own)
    once = max(counter.total / speed, (kept + sent + crossing) / _BYTES_A_MS)
    back = once if has_input_gradient else 0.0
    weights = sum(p.nbytes for _, p in named)
    gradients = sum(p.nbytes for _, p in named if p.requires_grad)
    state = gradients * _optimizer_ratio(optimizer)
    times = {F: once, I: back, W: once, B: back + once, R: once}
    times |= {U: 3 * (gradients + state) / _BYTES_A_MS, G: 5 * gradients / _BYTES_A_MS}
    return LayerCost(times, Size(weights, gradients, state, kept, kept, sent, crossing), name), outputs


def _optimizer_ratio(optimizer: OptimizerFactory) -> float:
    """Return the bytes of optimizer state for each byte of parameters, as measured with a small parameter."""
    parameter = nn.Parameter(torch.zeros(4096))
    trial = optimizer([("weight", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    kept = sum(t.nbytes for state in trial.state.values() for t in state.values() if isinstance(t, Tensor))
    return kept / parameter.nbytes
