"""The batch of a list of layers: inputs and targets."""

from __future__ import annotations

from ..dependency import BatchError
from ..workers.transport.payload import Tree


def as_pair(batch: Tree) -> tuple[Tree, Tree]:
    """Return a batch of a list of layers as (inputs, targets).

    Raises:
        BatchError: it is no pair.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        length = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise BatchError(f"batch is a {type(batch).__name__}{length}: must be (inputs, targets), trees of tensors")
    return batch[0], batch[1]
