"""What the comparison with one process does otherwise for a pipeline that trains on slices of sequences.

The reference trains on whole sequences, so sums over tokens are made in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..workers.compute.torch_internals import OperatorMode
from ..workers.transport.payload import tensors_of


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
