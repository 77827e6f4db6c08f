"""Microbatches of losses with means beside sums that a number of the whole batch divides."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...workers.compute.result import NUM_ITEMS
from ...workers.transport.payload import Tree
from .microbatches import Microbatches, divides_sums, has_items, rows_in


def with_means(found: Microbatches) -> Microbatches:
    """Return microbatches with the `NUM_ITEMS` of their share of rows, for losses with terms beside such sums.

    Each loss is then a mean of its microbatch. Terms that are means already, as a router's, would be added up else.
    """
    shares = factors = found.shares  # where a loss function, or a metric, is given the number
    if divides_sums(found.inputs[0], found.targets[0]):
        rows: list[float] = [rows_in(inputs) for inputs in found.inputs]
        for m, (begin, end, length) in enumerate(found.places or ()):
            rows[m] *= (end - begin) / length
        shares = [each / sum(rows) for each in rows]
        factors = [share / before for share, before in zip(shares, found.shares, strict=True)]
    sides = [[_multiplied(*each) for each in zip(side, factors, strict=True)] for side in (found.inputs, found.targets)]
    return replace(found, inputs=sides[0], targets=sides[1], shares=shares)


def _multiplied(side: Tree, factor: float) -> Tree:
    """Return a side of a microbatch with another `NUM_ITEMS`, a tensor, so that no forward differs by a number."""
    if not has_items(side):
        return side
    if isinstance(side, tuple):
        return side[0], _multiplied(side[1], factor)
    return {**side, NUM_ITEMS: torch.as_tensor(side[NUM_ITEMS] * factor)}
