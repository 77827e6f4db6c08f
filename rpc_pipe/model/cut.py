"""The number of layers of each stage. Loads without torch, so that a wrong cut is refused before workers start."""

from __future__ import annotations

from collections.abc import Sequence

from ..dependency import ModelError


def cut(num_layers: int, num_stages: int, split: Sequence[int] | None = None) -> list[range]:
    """Return the layers of each stage: as `split` counts them, or as evenly as possible.

    Raises:
        ModelError: a stage would be left without a layer, or `split` does not add up.

    >>> cut(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    if split is None:
        if num_stages > num_layers:
            raise ModelError(f"num_workers: {num_stages} stages, and {num_layers} layers or blocks; take fewer workers")
        small, larger = divmod(num_layers, num_stages)
        split = [small + (stage < larger) for stage in range(num_stages)]
    if not isinstance(split, Sequence) or isinstance(split, str):
        raise ModelError(f"split {split!r}: must be a list with the number of layers of each stage, such as [3, 2, 2]")
    if len(split) != num_stages or sum(split) != num_layers or min(split) < 1:
        raise ModelError(f"split {list(split)}: must be {num_stages} numbers of at least 1 with the sum {num_layers}")
    starts = [sum(split[:stage]) for stage in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, split, strict=True)]
