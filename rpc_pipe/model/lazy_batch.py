"""A batch that is read where it is used: a worker reads the inputs, the targets, both, some fields or nothing."""

from __future__ import annotations

from ..workers.transport.payload import Tree, map_tensors

#: of inputs, or of targets: all, none, or the named fields of a dict
Some = bool | frozenset[str]


class LazyBatch:
    """Rows that every worker knows by name and only some read."""

    #: of the batch
    rows: int
    #: names the rows and the data that they come from: what all workers must have alike
    label: str
    #: whether the worker of the first stage alone can read it; others pull what they use from there
    lent: bool = False
    #: how long its last reader waited, in ns, and for what: disk, network or decode
    waited_ns: int = 0
    waited_for: str = ""

    def read(self, inputs: Some, targets: Some) -> tuple[Tree, Tree]:
        """Return (inputs, targets), None for what is not asked for; of a dict the fields that are."""
        raise NotImplementedError

    def look(self) -> tuple[Tree, Tree]:
        """Return all of it, and read nothing ahead: others of the kind may be read otherwise."""
        return self.read(True, True)

    @property
    def form(self) -> tuple[Tree, Tree] | None:
        """What batches from there look like, of tensors without numbers; None: no batch has been noted."""
        return None

    @property
    def uniform(self) -> bool:
        """Whether the rows of all batches from there have that form."""
        return False

    def note(self, form: tuple[Tree, Tree], *, uniform: bool) -> None:
        """Hear what batches from there look like."""

    def follow(self) -> None:
        """Hear that `finished` will be called, unless what is asked of the batch fails."""

    def finished(self) -> None:
        """Hear that every worker has done what it was asked to do with the batch."""


def label_of(batch: object) -> str:
    """Return what a batch is called; nothing, if it has no name."""
    return batch.label if isinstance(batch, LazyBatch) else ""


def form_of(batch: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """Return what a batch looks like, of tensors without numbers."""
    found: tuple[Tree, Tree] = map_tensors(batch, lambda tensor: tensor.new_empty(tensor.shape, device="meta"))
    return found
