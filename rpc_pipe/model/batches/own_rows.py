"""The microbatches of a lazy batch, and the rows of it that a process reads, also where rows are grouped by length."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...dependency import Spec
from ...workers.transport.payload import Tree, map_tensors, rows_of_parts, split_rows, tensors_of
from ...workers.transport.scatter import run_by
from .microbatches import LazyBatch, Microbatches, TokenCount, count_tokens, shares_of


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
