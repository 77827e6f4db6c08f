"""Estimated costs of a model that is too large to run: its operations are counted on the meta device. Needs torch."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from ...dependency import B, F, G, I, Kind, R, U, W
from ...model.user_model import UserModel
from ...workers.compute.split_backward import Saved
from ...workers.compute.torch_internals import OperatorMode
from ...workers.compute.updating import OptimizerFactory
from ...workers.transport.payload import Tree, map_tensors, tensors_of
from ..footprint import Size
from ..profile import LayerCost
from .block_timing import num_bytes

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
    inputs, target = user_model.pair(_on_meta(batch))
    costs: list[LayerCost] = []
    layers = user_model.layers()
    count = len(layers)
    for i, made_layer in enumerate(layers):
        with torch.device("meta"):
            layer = made_layer if isinstance(made_layer, nn.Module) else made_layer()
        layer = copy.deepcopy(layer).to("meta")
        leaves = [tensor.requires_grad_() for tensor in tensors_of(inputs) if i and tensor.is_floating_point()]
        saved = Saved()
        with _OperationCounter() as counter, saved.hooks():
            outputs = layer(inputs)
            if i == count - 1 and user_model.loss_fn is not None:
                user_model.loss_fn(outputs, target)
        crossing = num_bytes(outputs) if i < count - 1 else 0
        name = f"{i} {type(layer).__name__}"
        named = list(layer.named_parameters())
        operations = counter.total
        cost = _cost(
            operations, saved, named, num_bytes(inputs), crossing, name, speed, has_input_gradient=bool(leaves)
        )
        costs.append(_with_parameters(cost, named, optimizer))
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
        stage.forward(leaves, args, kwargs)  # the first run observes the whole model
        saved = Saved()
        with _OperationCounter() as counter, saved.hooks():
            outputs: Any = stage.forward(leaves, args, kwargs)
        crossing = num_bytes(outputs) if i < len(cut) - 1 else 0
        operations = counter.total
        named = list(stage.named_parameters())
        cost = _cost(
            operations, saved, named, num_bytes(payload), crossing, block.name, speed, has_input_gradient=i > 0
        )
        costs.append(_with_parameters(cost, named, optimizer))
        payload = outputs if i < len(cut) - 1 else ()
    return costs


def _on_meta(tree: Tree) -> Tree:
    return map_tensors(tree, lambda tensor: tensor.to("meta"))


def _cost(
    operations: float,
    saved: Saved,
    named: Sequence[tuple[str, nn.Parameter]],
    inputs: float,
    outputs: float,
    name: str,
    speed: float,
    *,
    has_input_gradient: bool,
) -> LayerCost:
    """Return the costs of a block, given the operations of its forward; I and W take as many each."""
    # Storages on the meta device have no address, but an object each.
    own = {parameter.untyped_storage()._cdata for _, parameter in named}
    held = {id(handle.tensor): handle.tensor for handle in saved._handles if handle.tensor is not None}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held.values()}
    kept = sum(amount for storage, amount in storages.items() if storage not in own)
    once = max(operations / speed, (kept + inputs + outputs) / _BYTES_A_MS)
    times: dict[Kind, float] = {F: once, I: once if has_input_gradient else 0.0, W: once, R: once, U: 0.0}
    times[B] = times[I] + times[W]
    return LayerCost(times, Size(activations=kept, after_inputs=kept, inputs=inputs, outputs=outputs), name)


def _with_parameters(
    cost: LayerCost, named: Sequence[tuple[str, nn.Parameter]], optimizer: OptimizerFactory
) -> LayerCost:
    """Return the cost with times of updates, and the bytes of weights, gradients and optimizer state."""
    weights = sum(p.nbytes for _, p in named)
    gradients = sum(p.nbytes for _, p in named if p.requires_grad)
    size = replace(cost.size, weights=weights, gradients=gradients, optimizer=gradients * _optimizer_ratio(optimizer))
    return replace(
        cost,
        size=size,
        times={**cost.times, U: 3 * (gradients + size.optimizer) / _BYTES_A_MS, G: 5 * gradients / _BYTES_A_MS},
    )


def _optimizer_ratio(optimizer: OptimizerFactory) -> float:
    """Return the bytes of optimizer state for each byte of parameters, as measured with a small parameter."""
    parameter = nn.Parameter(torch.zeros(4096))
    trial = optimizer([("weight", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    kept = sum(t.nbytes for state in trial.state.values() for t in state.values() if isinstance(t, Tensor))
    return kept / parameter.nbytes
