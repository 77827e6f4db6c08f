"""Batches that were read ahead, and whether somebody has written them before their step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..dependency import ConfigError
from ..workers.compute.digest import MOST_TENSORS
from ..workers.transport.payload import Tree, tensors_of


class BatchMemory:
    """The memory of a batch's inputs and of its targets, as it was read.

    Args:
        sides: of both a piece, which is a view of all.
        rows: of the whole.
        described: form and digest of both.
    """

    def __init__(self, sides: Iterable[Tree], rows: int, described: Sequence[str]) -> None:
        self._sides = [[t for t in tensors_of(side) if not t.is_inference()] for side in sides]
        self._versions = [[tensor._version for tensor in side] for side in self._sides]
        self._places = [[(t.data_ptr(), t.shape, t.stride(), rows) for t in side] for side in self._sides]
        self._described = described

    def written(self) -> bool:
        """Tell whether torch has written it since."""
        return self._versions != [[tensor._version for tensor in side] for side in self._sides]

    def holds(self, later: BatchMemory) -> bool:
        """Tell whether a later batch is where this one was: what numpy writes has no versions."""
        for side, places, other, mine, theirs in zip(
            self._sides, self._places, later._places, self._described, later._described, strict=True
        ):
            if places == other and 0 < len(side) <= MOST_TENSORS and mine != theirs:
                return True
        return False


def refuse_rewritten(batches: Sequence[BatchMemory]) -> None:
    """Refuse batches, given in their order, that are not what they were when they were read.

    Raises:
        ConfigError: there is one.
    """
    if any(each.written() for each in batches) or any(each.holds(later) for each, later in pairwise(batches)):
        raise ConfigError(
            "train: a batch was written after it was read, such as memory that is used for each batch anew: batches "
            "are read ahead of the step that runs; give each one memory of its own, or call `step` for each batch"
        )
