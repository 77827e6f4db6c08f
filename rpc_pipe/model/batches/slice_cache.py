"""What a Hugging Face model takes for its cache of keys and values while it trains on a slice of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...workers.compute.sequence import current


class SliceCache:
    """A `past_key_values` that knows a slice's place; keys and values lie with the stage that computes it.

    Each stage has the layers that it runs, and all know from here how much has come before: so masks and positions are
    those of the whole sequence on every stage.

    Args:
        begin, end: place of the slice; `total`: length of the sequence.
        whole: the model's arguments by name for all of it.
    """

    is_compileable = False

    def __init__(self, begin: int, end: int, total: int, whole: Mapping[str, Any]) -> None:
        self._place, self.whole = (begin, end, total), whole

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceCache) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens come before the slice."""
        return self._place[0]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many keys there are, and the place of the first."""
        return self._place[0] + query_length, 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: object) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slices up to this one."""
        begin = self._place[0]
        piece = current()
        if piece is None or type(keys) is not Tensor:  # a forward on shapes
            before = [new.new_zeros((*new.shape[:-2], begin, new.shape[-1])) for new in (keys, values)]
            return torch.cat([before[0], keys], -2), torch.cat([before[1], values], -2)
        left = piece.left
        return left.join((layer_idx, 0), keys, begin), left.join((layer_idx, 1), values, begin)
