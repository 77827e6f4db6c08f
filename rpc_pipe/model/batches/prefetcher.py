"""Batches that are read ahead of the running step."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count

from ...dependency import BatchError
from ...workers.transport.payload import Tree, tensors_of
from .microbatches import Microbatches, label_of


class Prefetcher:
    """Takes batches from the user's iterable ahead of the running step, on the user's thread.

    Args:
        count: how many batches ahead.
    """

    def __init__(self, batches: Iterable[Tree], cut: Callable[[Tree], Microbatches], count: int = 1) -> None:
        self._count = count
        self._batches = iter(batches)
        self._cut = cut
        self._read: dict[int, Microbatches] = {}

    def advance(self, step: int) -> None:
        """Read the batches up to `count` ahead of `step`, and drop the batches before it."""
        self._read.pop(step - 1, None)
        for wanted in range(step, step + 1 + self._count):
            if wanted not in self._read and (not self._read or wanted - 1 in self._read):
                for batch in self._batches:
                    self._read[wanted] = self._cut(batch)
                    break
                if {wanted - 1, wanted} <= self._read.keys():
                    _refuse_rewritten(self._read[wanted - 1], self._read[wanted])

    def at(self, step: int) -> Microbatches | None:
        """Return the batch of `step`; None: there is none."""
        return self._read.get(step)

    def finished(self, step: int) -> str:
        """Inform the loader that the batch of `step` has been trained on; return its label."""
        self._read[step].finished()
        return label_of(self._read[step].lazy)

    def since(self, first: int) -> Iterator[Microbatches]:
        """Yield the batches from one step on, as this worker reads them now."""
        for step in count(first):
            if step not in self._read:
                return
            yield self._read[step].read_now()


def _refuse_rewritten(earlier: Microbatches, later: Microbatches) -> None:
    """Raise if the memory of a batch was overwritten, as by a next batch in the same memory.

    Raises:
        BatchError: it has.
    """
    if earlier.now is None or later.now is None or earlier.described == later.described:
        return
    places, others = ({t.data_ptr() for t in tensors_of((m.inputs[0], m.targets[0]))} for m in (earlier, later))
    if places & others and earlier.now() != earlier.described:
        fix = "give each batch its memory, or call `step` for each"
        raise BatchError(f"train: a batch was written after it was read, ahead of the step that runs; {fix}")
