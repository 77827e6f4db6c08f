"""A batch that each worker reads as far as it uses it: inputs, targets, both, or nothing."""

from __future__ import annotations

from typing import Protocol

from ...workers.transport.payload import Tree


class SomeRows(Protocol):
    """A choice of rows of each batch."""

    def of(self, rows: int, begin: int, /) -> list[int]:
        """Return the rows, of a batch of `rows` rows from position `begin` on."""


class LazyBatch:
    """A batch that every worker can name without reading it."""

    #: number of rows
    rows: int
    #: names the rows and their source; must be equal on all workers
    label: str
    #: whether only the worker of the first stage can read it; other workers pull the parts that they use
    scattered: bool = False
    #: the wait of its last reader, in ns, and the cause: disk, network or decode
    waited_ns: int = 0
    waited_for: str = ""

    def read(self, inputs: bool, targets: bool, own: SomeRows | None = None) -> tuple[Tree, Tree]:
        """Return the wanted ones of (inputs, targets), only the rows `own`; None for the unwanted."""
        raise NotImplementedError

    def follow(self) -> None:
        """Announce that `finished` will be called, unless the call with the batch fails."""

    def finished(self) -> None:
        """Announce that every worker has finished the call with the batch."""


def label_of(batch: object) -> str:
    """Return the label of a lazy batch; "" for any other."""
    return batch.label if isinstance(batch, LazyBatch) else ""
