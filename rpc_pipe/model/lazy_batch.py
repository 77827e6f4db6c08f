"""A batch that is read where it is used: a worker reads the inputs, the targets, both or nothing."""

from __future__ import annotations

from ..workers.transport.payload import Tree


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

    def read(self, inputs: bool, targets: bool) -> tuple[Tree, Tree]:
        """Return (inputs, targets), None for what is not asked for."""
        raise NotImplementedError

    def follow(self) -> None:
        """Hear that `finished` will be called, unless what is asked of the batch fails."""

    def finished(self) -> None:
        """Hear that every worker has done what it was asked to do with the batch."""


def label_of(batch: object) -> str:
    """Return what a batch is called; nothing, if it has no name."""
    return batch.label if isinstance(batch, LazyBatch) else ""
