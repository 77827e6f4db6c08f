"""Copies of layers, for a second replica of a stage in one process, or for a stage with a tied weight."""

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..dependency.errors import first_sentence
from .observe.containers import shared
from .parameter_hooks import copy_attachments


def copies_of(layers: Sequence[nn.Module], parameters: Collection[int] | None = None) -> list[nn.Module]:
    """Return copies of layers, hooks and attributes of their parameters included.

    Args:
        parameters: ids of the parameters to copy; other parameters, and buffers, are shared with the layers. None: all
            are copied.

    Raises:
        ModelError: a layer cannot be copied.
    """
    # deepcopy refuses attributes that every forward computes, as `torch.nn.utils.weight_norm` does.
    values = [value for layer in layers for module in layer.modules() for value in vars(module).values()]
    computed = [value for value in values if isinstance(value, Tensor) and not value.is_leaf]
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
    read = shared(module for layer in layers for module in layer.modules())
    memo |= {key: value for key, value in read.items() if key == id(value)}  # so that changes by hand hold in all
    if parameters is not None:
        common = (tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
        memo |= {id(tensor): tensor for tensor in common if id(tensor) not in parameters}
    copies = []
    for layer in layers:
        try:
            if any(isinstance(module, torch.jit.ScriptModule) for module in layer.modules()):
                raise TypeError("a script is in it")
            copies.append(copy.deepcopy(layer, memo))
        except Exception as error:
            why = f"a {type(layer).__name__} cannot be copied ({first_sentence(error)})"
            raise ModelError(f"model: {why}; pass what makes it") from error
    for parameter in dict.fromkeys(parameter for layer in layers for parameter in layer.parameters()):
        if memo[id(parameter)] is not parameter:
            copy_attachments(memo[id(parameter)], parameter, lambda value: copy.deepcopy(value, memo))
    return copies
