"""A loader in the place of a batch: how it is recognised, and the mean over its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeGuard

from torch import Tensor

from ...dependency import BatchError
from .lazy_batch import LazyBatch

#: batches themselves, though they can be iterated over
_BATCHES = (Tensor, tuple, list, Mapping, str, bytes, LazyBatch)


def is_loader(given: Any) -> TypeGuard[Iterable[Any]]:
    """Return whether `given` is iterated over for batches: a DataLoader, a generator and the like."""
    return isinstance(given, Iterable) and not isinstance(given, _BATCHES) and not is_dataclass(given)


def mean_over(found: Iterable[tuple[float, float]]) -> float:
    """Return the mean of (value, weight) pairs; nan if the weights are 0.

    Raises:
        BatchError: there is none.
    """
    pairs = list(found)
    if not pairs:
        raise BatchError("loader: gave no batch: a generator can be used once, so make it anew for each call")
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs if weight) / total if total else float("nan")
