"""A batch that each worker reads as far as it uses it: inputs, targets, both, some fields, or nothing."""

from __future__ import annotations

from typing import NamedTuple

from ...dependency import Spec
from ...workers.transport.payload import Tree, map_tensors, rows_of_parts
from ...workers.transport.scatter import run_by

#: the part of inputs, or of targets, to read: all, none, or these fields of a dict
FieldSelection = bool | frozenset[str]


class OwnRows(NamedTuple):
    """The rows of a batch that a worker runs, where other replicas run the others."""

    spec: Spec
    worker: int

    def microbatches(self, rows: int) -> list[int]:
        """Return its microbatches of a batch of so many rows; if there are none the first, for its form."""
        every = list(range(min(self.spec.num_microbatches, rows)))
        return [number for number in run_by(self.spec, self.worker, every) if number is not None] or [0]

    def of(self, rows: int) -> list[int]:
        """Return the rows of these microbatches."""
        parts = rows_of_parts(rows, min(self.spec.num_microbatches, rows))
        return [row for number in self.microbatches(rows) for row in parts[number]]


class LazyBatch:
    """A batch that every worker can name without reading it."""

    #: number of rows
    rows: int
    #: names the rows and their source; must be equal on all workers
    label: str
    #: whether only the worker of the first stage can read it; the others pull from there what they use
    scattered: bool = False
    #: how long its last reader waited, in ns, and for what: disk, network or decode
    waited_ns: int = 0
    waited_for: str = ""

    def read(self, inputs: FieldSelection, targets: FieldSelection, own: OwnRows | None = None) -> tuple[Tree, Tree]:
        """Return (inputs, targets) as far as they are selected, only their `own` rows; None for what is not."""
        raise NotImplementedError

    def look(self) -> tuple[Tree, Tree]:
        """Return the whole batch without reading ahead, as later batches may be read in part."""
        return self.read(True, True)

    @property
    def form(self) -> tuple[Tree, Tree] | None:
        """A batch of this source as meta tensors; None: unknown."""
        return None

    @property
    def uniform(self) -> bool:
        """Whether all batches of this source have this form, except for the number of rows."""
        return False

    def note(self, form: tuple[Tree, Tree], *, uniform: bool) -> None:
        """Record the form of batches of this source."""

    def follow(self) -> None:
        """Announce that `finished` will be called, unless the call with the batch fails."""

    def finished(self) -> None:
        """Announce that every worker has finished the call with the batch."""


def label_of(batch: object) -> str:
    """Return the label of a lazy batch; "" for others."""
    return batch.label if isinstance(batch, LazyBatch) else ""


def form_of(batch: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """Return a batch as meta tensors."""
    found: tuple[Tree, Tree] = map_tensors(batch, lambda tensor: tensor.new_empty(tensor.shape, device="meta"))
    return found
