"""Differences in the comparison with one process for a pipeline that trains on slices of sequences.

The reference trains on whole sequences, so sums over tokens are made in another order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..dependency import Action
from ..workers.compute.shard import Shard
from ..workers.compute.torch_internals import OperatorMode
from ..workers.hooks import Listener
from ..workers.transport.payload import tensors_of


class Floats(OperatorMode):
    """Records the float types that the reference computes in, such as float32 for norms."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[torch.dtype] = set()

    @property
    def precision(self) -> float:
        """The precision of the coarsest type that was seen."""
        return max(torch.finfo(dtype).eps for dtype in self._seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = result if isinstance(result, (Tensor, tuple, list)) else ()
        self._seen |= {tensor.dtype for tensor in tensors_of(given) if tensor.is_floating_point() and tensor.dim()}
        return result


class Held(Listener):
    """Records a worker's real peaks: the number of slices at once, and the bytes that they carry to later slices.

    Attributes:
        most: (slices, bytes).
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._shards = [*shards]
        self.most = (0, 0)

    def action_started(self, step: int, action: Action) -> None:
        held = sum(shard.num_held for shard in self._shards)
        kept = sum(cut.num_bytes for shard in self._shards if (cut := shard.slices))
        self.most = max(self.most[0], held), max(self.most[1], kept)
