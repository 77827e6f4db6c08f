"""A user's batch as microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from ..dependency import ConfigError
from ..workers.compute.digest import describe
from ..workers.transport.payload import Tree, num_rows, num_tokens, split_rows
from .arguments import refuse_batch


@dataclass(frozen=True)
class Microbatches:
    """Inputs and targets, cut alike."""

    inputs: list[Tree]
    targets: list[Tree]
    #: each one's share of the rows
    shares: list[float]
    rows: int
    #: how many whole numbers the inputs are, such as bytes or words
    tokens: int
    #: form and digests of inputs and targets, to be compared with other workers'
    described: tuple[str, str]

    @classmethod
    def of(
        cls,
        batch: Tree | None,
        microbatches: Sequence[tuple[Tree, Tree]] | None,
        num_microbatches: int,
        number: int,
    ) -> Microbatches:
        """Cut `batch`, (inputs, targets), into at most `num_microbatches`, or take what has been cut by the user.

        Args:
            number: of the calls so far; which of many tensors are compared with other workers' depends on it.

        Raises:
            ConfigError: there is neither, or it is no pair, or has no rows.
        """
        refuse_batch(batch, microbatches)
        if microbatches is not None:
            pieces = list(microbatches)
            batch = [inputs for inputs, _ in pieces], [targets for _, targets in pieces]
        else:
            assert batch is not None
            inputs, targets = batch
            # A worker may have been given one of the two only.
            whole = inputs if targets is None else targets if inputs is None else (inputs, targets)
            parts = min(num_microbatches, max(1, num_rows(whole)))
            pieces = list(zip(split_rows(inputs, parts), split_rows(targets, parts), strict=True))
        rows = [num_rows(targets if inputs is None else inputs) for inputs, targets in pieces]
        if 0 in rows:
            which = f"microbatch {rows.index(0)}" if len(rows) > 1 else "the batch"
            raise ConfigError(f"{which} has no rows: needs at least 1")
        return cls(
            [inputs for inputs, _ in pieces],
            [targets for _, targets in pieces],
            [number / sum(rows) for number in rows],
            sum(rows),
            sum(num_tokens(inputs) for inputs, _ in pieces),
            (describe(batch[0], number), describe(batch[1], number)),
        )


class Ahead:
    """Reads a user's batches on the user's thread, one ahead of the step that runs, for all workers of this process."""

    def __init__(self, batches: Iterable[Tree], cut: Callable[[Tree], Microbatches]) -> None:
        self._batches = iter(batches)
        self._cut = cut
        self._read: dict[int, Microbatches] = {}

    def advance(self, step: int) -> None:
        """Read the batches of `step` and the next; forget those before."""
        self._read.pop(step - 1, None)
        for wanted in (step, step + 1):
            if wanted not in self._read and (not self._read or wanted - 1 in self._read):
                for batch in self._batches:
                    self._read[wanted] = self._cut(batch)
                    break

    def __iter__(self) -> Iterator[Microbatches]:
        for step in count():
            if step not in self._read:
                return
            yield self._read[step]


def join_rows(pieces: list[Tree]) -> Tree:
    """Put outputs of microbatches together along dimension 0.

    Raises:
        ConfigError: an output has no such dimension.
    """
    first = pieces[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            raise ConfigError("predict: the model gives a tensor without rows; let it give a row for each of its input")
        return torch.cat(pieces)
    if isinstance(first, (tuple, list)):
        columns = [join_rows(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, dict):
        return type(first)((key, join_rows([piece[key] for piece in pieces])) for key in first)
    return first
