"""The microbatches of a lazy batch, and the rows of it that a process reads, also where rows are grouped by length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ...dependency import Spec
from ...workers.transport.payload import Tree, map_tensors, rows_of_parts, split_rows, tensors_of
from ...workers.transport.scatter import run_by
from .microbatches import LazyBatch, Microbatches, Pair, TokenCount, count_tokens, shares_of

if TYPE_CHECKING:
    from .ordering import Ordering


class OwnRows(NamedTuple):
    """The rows of a batch that a process runs, where other replicas or members of its worker run the rest."""

    spec: Spec
    worker: int
    #: the number of this process among the members that take microbatches in turn, and their count
    member: int = 0
    members: int = 1

    def microbatches(self, count: int) -> list[int]:
        """Return its microbatches of `count`; without any the first, for its form."""
        every = list(range(count))[self.member :: self.members]
        return [number for number in run_by(self.spec, self.worker, every) if number is not None] or [0]

    def of(self, rows: int, begin: int = 0) -> list[int]:
        """Return the rows of these microbatches, of a batch of `rows` rows anywhere."""
        parts = rows_of_parts(rows, min(self.spec.num_microbatches, rows))
        return [row for number in self.microbatches(len(parts)) for row in parts[number]]


def read_microbatches(
    batch: LazyBatch, pair: tuple[Tree, Tree], parts: int, own: OwnRows | None = None
) -> Microbatches:
    """Split the read part of a lazy batch.

    Args:
        own: the rows that have been read, if not all; microbatches of other replicas are meta tensors.
    """
    rows = [batch.rows // parts + (number < batch.rows % parts) for number in range(parts)]  # as split_rows does
    if own is None:
        inputs, targets = (split_rows(side, parts) for side in pair)
    else:
        inputs, targets = (_split(side, rows, own.microbatches(parts)) for side in pair)
    shares, count = shares_of(rows, inputs[0], targets[0]), count_tokens(inputs, targets)
    return lazy_microbatches(batch, inputs, targets, shares, count, batch.label)


def lazy_microbatches(
    batch: LazyBatch, inputs: list[Tree], targets: list[Tree], shares: list[float], count: TokenCount, label: str
) -> Microbatches:
    """Return the microbatches of a lazy batch; `label`: equal on workers that have the same."""
    described, waited = (label, ""), (batch.waited_ns, batch.waited_for)
    return Microbatches(inputs, targets, shares, batch.rows, *count, waited, described=described, lazy=batch)


def _split(tree: Tree, rows: Sequence[int], own: Sequence[int]) -> list[Tree]:
    """Split the read part of a batch, the microbatches `own`; the rest of the microbatches have forms alone."""
    read = {id(t): dict(zip(own, t.split([rows[n] for n in own]), strict=True)) for t in tensors_of(tree)}

    def piece(number: int) -> Tree:
        if number in own:
            return map_tensors(tree, lambda t: read[id(t)][number])
        return map_tensors(tree, lambda t: t.new_empty((rows[number], *t.shape[1:]), device="meta"))

    return [piece(number) for number in range(len(rows))]


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
