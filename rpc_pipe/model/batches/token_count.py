"""The number of tokens in a batch, without padding where a mask or labels show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...workers.compute.result import IGNORED as IGNORED
from ...workers.transport.payload import Tree, tensors_of


class TokenCount(NamedTuple):
    """The tokens of a batch; 0 if its inputs are not whole numbers."""

    tokens: int = 0
    #: whether padding counts too, because neither a mask nor labels show it
    with_padding: bool = False


def count_tokens(inputs: Sequence[Tree], targets: Sequence[Tree]) -> TokenCount:
    """Return the tokens of a batch, given in one or several parts.

    Microbatches that another replica reads are known by shape alone. Their share of padding is taken from the rest.
    No device is waited for: tensors there count whole.
    """
    total = seen = real = 0
    for each, target in zip(inputs, targets, strict=True):
        first = next(tensors_of(each), None)
        if first is None or first.is_floating_point() or first.is_complex():
            return TokenCount()
        total += first.numel()
        marks = _marks(each, target, first.shape)
        if marks is not None:
            seen += first.numel()
            real += int(marks.count_nonzero())
    return TokenCount(round(total * real / seen) if seen else total, not seen)


def _marks(inputs: Tree, target: Tree, shape: torch.Size) -> Tensor | None:
    """Return a tensor of the shape of the tokens that is 0 at padding; None if there is none on the host."""
    named = {**dict(_named(inputs)), **dict(_named(target))}
    labels = target if isinstance(target, Tensor) else named.get("labels")
    for found, is_mask in (named.get("attention_mask"), True), (labels, False):
        if isinstance(found, Tensor) and found.shape == shape and found.is_cpu and not found.is_floating_point():
            return found if is_mask else found != IGNORED
    return None


def _named(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a batch, inside of tuples, too."""
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _named(part)
