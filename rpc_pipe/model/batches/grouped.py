"""Microbatches of rows that are grouped by length: few jobs have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ...dependency import Spec
from ...workers.transport.payload import Tree
from .lazy_batch import LazyBatch
from .microbatches import Microbatches, Pair
from .own_rows import OwnRows, lazy_microbatches
from .token_count import count_tokens

if TYPE_CHECKING:
    from .ordering import Ordering


class LengthNeeds(NamedTuple):
    """The needs of a pipeline in the microbatches of a batch."""

    num_stages: int
    #: the least number of microbatches, and a divisor of their number
    least: int
    multiple: int
    #: whether the model computes its loss itself, from its inputs
    loss_is_inside: bool = False
    #: (rows, length) -> predicted seconds of a microbatch; None: by tokens
    seconds: Callable[[int, int], float] | None = None


class Grouped(NamedTuple):
    """The microbatches of a batch with rows that have been grouped by length."""

    inputs: list[Tree]
    targets: list[Tree]
    #: of the loss of the batch: by labels that count, or by rows
    shares: list[float]
    #: (rows, length) of each microbatch
    sizes: list[tuple[int, int]]
    #: the microbatches that have been read; None: all
    here: Sequence[int] | None
    #: equal on workers that group alike
    label: str


class GroupedBatch(LazyBatch):
    """A batch with rows that may be grouped by length."""

    def grouped(self, inputs: bool, targets: bool, needs: LengthNeeds, own: OwnRows | None) -> Grouped:
        """Return the wanted sides of the batch in microbatches by length, perhaps the rows `own` alone."""
        raise NotImplementedError


def read_grouped(
    batch: LazyBatch,
    sides: tuple[bool, bool],
    pair: Pair,
    *,
    spec: Spec,
    members: int,
    loss_is_inside: bool,
    ordering: Ordering | None,
    own: OwnRows | None,
) -> Microbatches:
    """Return the microbatches of a batch with rows grouped by length.

    Args:
        sides: whether this worker uses inputs and targets.
        spec: over whole sequences; members: of each of its workers.
        own: rows of this process; other processes read the rest.
    """
    seconds = None if ordering is None else ordering.seconds
    needs = LengthNeeds(spec.num_stages, spec.num_routes * members, members, loss_is_inside, seconds)
    assert isinstance(batch, GroupedBatch)
    found = batch.grouped(*sides, needs, own)
    inputs, targets, here = found.inputs, found.targets, found.here or range(len(found.sizes))
    for number in here:
        inputs[number], targets[number] = pair((inputs[number], targets[number]))
    share = sum(map(math.prod, found.sizes)) / sum(math.prod(found.sizes[number]) for number in here)
    count = count_tokens(*([side[number] for number in here] for side in (inputs, targets)))
    whole, label = count._replace(tokens=round(count.tokens * share)), f"{batch.label}, {found.label}"
    return replace(lazy_microbatches(batch, inputs, targets, found.shares, whole, label), sizes=found.sizes)
