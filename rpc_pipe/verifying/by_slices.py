"""What the comparison with one process does otherwise for a pipeline that trains on slices of sequences.

The reference trains on whole sequences, so sums over tokens are made in another order. Nothing is dropped out: a slice
draws masks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model.user_model import UserModel
from ..workers.compute.torch_internals import OperatorMode
from ..workers.transport.payload import tensors_of

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


class Floats(OperatorMode):
    """Sees the types of floats that the reference computes in, such as those of norms in float32."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[torch.dtype] = set()

    @property
    def precision(self) -> float:
        """Of the coarsest of them."""
        return max(torch.finfo(dtype).eps for dtype in self._seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = result if isinstance(result, (Tensor, tuple, list)) else ()
        self._seen |= {tensor.dtype for tensor in tensors_of(given) if tensor.is_floating_point() and tensor.dim()}
        return result


def without_dropout(made: UserModel) -> UserModel:
    """Return a model in which nothing is dropped out."""
    model = made.model
    return replace(made, model=[*map(_without, model)] if isinstance(model, Sequence) else _without(model))


def _without(model: Any) -> Any:
    if not isinstance(model, nn.Module):
        return partial(_made_without, model)
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _made_without(make: Callable[..., Any], *args: Any) -> Any:
    return _without(make(*args))
