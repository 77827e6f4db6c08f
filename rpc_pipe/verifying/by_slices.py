"""What the comparison with one process does otherwise for a pipeline that trains on slices of sequences.

The reference trains on whole sequences, so sums over tokens are made in another order. Nothing is dropped out: a slice
draws masks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model.user_model import UserModel
from ..workers.compute.torch_internals import OperatorMode
from ..workers.transport.payload import tensors_of

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


class BySlices:
    """The comparison of a pipeline that trains on `slices`.

    Attributes:
        because: why its numbers may differ by rounding.
        precision: of the coarsest floats that the reference has computed in.
    """

    def __init__(self, slices: str) -> None:
        self.because = f"each sequence is computed in slices ({slices}), and what is summed over tokens slice by slice"
        self.precision = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context that looks at the floats in which the reference computes."""
        with _Floats() as floats:
            yield
        self.precision = max(torch.finfo(dtype).eps for dtype in floats.seen)


class _Floats(OperatorMode):
    """Sees the types of floats that operators give, such as those of norms that compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = result if isinstance(result, (Tensor, tuple, list)) else ()
        self.seen |= {tensor.dtype for tensor in tensors_of(given) if tensor.is_floating_point() and tensor.dim()}
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
