"""The error about a tensor of an unknown maker, which an observed forward takes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dependency import ModelError
from .frames import caller
from .observation import Event

#: functions that run backward inside a forward
_BACKWARD = {torch.autograd.grad: "torch.autograd.grad", Tensor.backward: "backward"}


def lost(tensor: Tensor, maker: Event | None, current: Event | None) -> ModelError:
    """Return the error about a tensor.

    Args:
        maker: the event that made it, if that is known.
        current: the event that takes it.
    """
    if current is not None and (called := _BACKWARD.get(current.func)):
        return ModelError(
            f"model: {current.where} calls {called} through blocks, of which each stage has only some; let a "
            "block do so for itself, or name a module that contains them with blocks="
        )
    what = f"a tensor of shape {tuple(tensor.shape)} that {caller()} takes"
    if maker is not None and maker.is_block:
        return ModelError(
            f"model: {what} was made in block {maker.where} and left it otherwise than by its return value; "
            "return it, or leave it in an attribute of the block"
        )
    return ModelError(
        f"model: {what} was made by an operation that Python does not see, or is kept by an object that is no "
        "module; put it inside a block, keep it in a module, or name a module that contains it with blocks="
    )


def stale_view(tensor: Tensor) -> ModelError:
    """Return the error about a view of a trained weight that an attribute keeps."""
    return ModelError(
        f"model: a tensor of shape {tuple(tensor.shape)} that {caller()} takes is a view of a weight, kept in an "
        "attribute: no update reaches its copies on stages; compute it in the forward, as by weight.t()"
    )
