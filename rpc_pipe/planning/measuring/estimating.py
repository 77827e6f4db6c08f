"""Estimated costs of a model that is too large to run: its operations are counted on the meta device. Needs torch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from ...dependency import B, F, G, I, R, U, W
from ...workers.compute.split_backward import Saved
from ...workers.compute.torch_internals import OperatorMode
from ...workers.compute.updating import OptimizerFactory
from ...workers.transport.payload import pack, unpack
from ..footprint import Size
from ..profile import LayerCost
from .timed_block import TimedBlock, num_bytes

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


def estimated(block: TimedBlock, speed: float, state: float) -> LayerCost:
    """Return the costs of a block, I and W taking as many operations each as its forward, which is run.

    Args:
        speed: operations a millisecond.
        state: bytes of optimizer state for each byte of parameters.
    """
    block.forward()  # the first run of a stage observes its whole model
    saved = Saved()
    with _OperationCounter() as counter, saved.hooks():
        leaves, output, _ = block.forward()
    block.output = unpack(pack(output))
    sent, crossing = block.inputs, num_bytes(output)
    # Storages on the meta device have no address, but an object each.
    own = {parameter.untyped_storage()._cdata for _, parameter in block.named}
    held = {id(handle.tensor): handle.tensor for handle in saved._handles if handle.tensor is not None}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held.values()}
    kept = sum(amount for storage, amount in storages.items() if storage not in own)
    once = max(counter.total / speed, (kept + sent + crossing) / _BYTES_A_MS)
    back = once if leaves else 0.0
    gradients = sum(parameter.nbytes for _, parameter in block.trained)
    times = {F: once, I: back, W: once, B: back + once, R: once}
    times |= {U: (3 + 3 * state) * gradients / _BYTES_A_MS, G: 5 * gradients / _BYTES_A_MS}
    size = Size(block.weights + block.buffers, gradients, state * gradients, kept, kept, sent, crossing)
    return LayerCost(times, size, block.name)


def optimizer_ratio(optimizer: OptimizerFactory) -> float:
    """Return the bytes of optimizer state for each byte of parameters, as measured with a small parameter."""
    parameter = nn.Parameter(torch.zeros(4096))
    trial = optimizer([("weight", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    kept = sum(t.nbytes for state in trial.state.values() for t in state.values() if isinstance(t, Tensor))
    return kept / parameter.nbytes
