"""Payloads on their way between host and devices: dense copies, and the layouts to give them on arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...transport.payload import Payload, is_dense, is_sparing, unfold

#: shape and strides of a tensor that is not dense
Look = tuple[tuple[int, ...], tuple[int, ...]] | None


def look_of(tensor: Tensor) -> Look:
    """Return the shape and strides of a tensor; None if it is dense, or had better be."""
    if tensor.layout is not torch.strided or is_dense(tensor) or not is_sparing(tensor.shape, tensor.stride()):
        return None
    return tensor.shape, tensor.stride()


@dataclass(slots=True)
class Moving(Payload):
    """A payload as dense copies that have been issued, with the layouts on arrival and the event of the arrival."""

    looks: list[Look]
    event: Any

    def unfold(self) -> Payload:
        """Return the payload as it was."""
        return Payload([spread_again(*each) for each in zip(self.tensors, self.looks, strict=True)], self.skeleton)


def spread_again(copy: Tensor, look: Look) -> Tensor:
    """Return the tensor that looks so, from its dense copy."""
    if look is None:
        return copy
    return unfold(copy.conj(), *look).conj() if copy.is_conj() else unfold(copy, *look)


def travels(tensor: Tensor) -> bool:
    """Return whether a tensor of a device has a layout that blocks of memory can hold."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
