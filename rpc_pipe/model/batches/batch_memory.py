"""Refusal of batches that were read ahead and then overwritten before their step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ...dependency import ConfigError
from ...workers.compute.digest import MOST_TENSORS
from ...workers.transport.payload import Tree, tensors_of


class BatchMemory:
    """Addresses, versions and digests of a batch's tensors when it was read.

    Args:
        sides: a microbatch of inputs and one of targets, views of the batch.
        rows: rows of the batch.
        described: shapes and digests of inputs and targets.
    """

    def __init__(self, sides: Iterable[Tree], rows: int, described: Sequence[str]) -> None:
        self._sides = [[t for t in tensors_of(side) if not t.is_inference()] for side in sides]
        self._versions = [[tensor._version for tensor in side] for side in self._sides]
        self._places = [[(t.data_ptr(), t.shape, t.stride(), rows) for t in side] for side in self._sides]
        self._described = described

    def written(self) -> bool:
        """Return whether torch has written the batch since."""
        return self._versions != [[tensor._version for tensor in side] for side in self._sides]

    def holds(self, later: BatchMemory) -> bool:
        """Return whether a later batch has the same addresses and other data: numpy's writes do not raise versions."""
        for side, places, other, mine, theirs in zip(
            self._sides, self._places, later._places, self._described, later._described, strict=True
        ):
            if places == other and 0 < len(side) <= MOST_TENSORS and mine != theirs:
                return True
        return False


def refuse_rewritten(batches: Sequence[BatchMemory]) -> None:
    """Refuse batches, given in order, that have changed since they were read.

    Raises:
        ConfigError: one has.
    """
    if any(each.written() for each in batches) or any(each.holds(later) for each, later in pairwise(batches)):
        raise ConfigError(
            "train: a batch was written after it was read, such as memory that is used for each batch anew: batches "
            "are read ahead of the step that runs; give each one memory of its own, or call `step` for each batch"
        )
