"""Microbatches without labels that count: their mean loss is NaN. The search runs when a loss is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..transport.payload import Tree
from .result import IGNORED, NUM_ITEMS


def unlabelled(inputs: Sequence[Tree], targets: Sequence[Tree]) -> str:
    """Return a sentence about the microbatches without a counted label; "" if there are none."""
    found = [str(m) for m, each in enumerate(zip(inputs, targets, strict=True)) if any(map(_is_empty, _labels(each)))]
    if not found:
        return ""
    which = f"microbatch {found[0]} are" if len(found) == 1 else f"microbatches {', '.join(found)} are"
    return (
        f"all labels of {which} {IGNORED}, and a mean over none is no number: put {NUM_ITEMS} into the batch for a "
        "model that divides by it, return (sum, weight) from a loss_fn, or take fewer microbatches"
    )


def _labels(side: Any, name: str = "") -> list[Tensor]:
    """Return the labels in a microbatch's (inputs, targets): tensors of that name, and targets of a loss function."""
    if isinstance(side, Tensor):
        return [side] if name == "labels" else []
    parts: Any = side.items() if isinstance(side, dict) else ()
    if isinstance(side, (tuple, list)):
        parts = [("labels" if place == 1 else name, each) for place, each in enumerate(side)]
    return [labels for key, each in parts for labels in _labels(each, str(key))]


def _is_empty(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_meta) and bool((labels == IGNORED).all())
