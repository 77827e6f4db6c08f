"""Rows of different lengths, put into microbatches by length and padded within a microbatch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..dependency import BatchError, refuse_below
from ..model.batches.microbatches import SplitBatch
from ..model.batches.token_count import IGNORED
from ..workers.compute.result import NUM_ITEMS

#: a row: tensors or lists of numbers by name, or (inputs, targets)
Row = Mapping[str, Any] | Sequence[Any]
#: microbatches for each stage, about, where time follows tokens
_A_STAGE = 4


def batches_by_length(
    rows: Iterable[Row],
    *,
    batch: int,
    most_tokens: int,
    num_stages: int,
    seconds: Callable[[int, int], float] | None = None,
    least: int = 1,
    next_token: bool = True,
) -> Iterator[SplitBatch]:
    """Yield batches for `Pipeline.step` and `train`, whose microbatches have rows of similar length.

    Fields of a row with one dimension share the row's length and are padded to the microbatch's longest row: labels and
    targets by -100, others by 0. Named rows get an `attention_mask`, and with labels of tokens the batch's number of
    labels that count, `num_items_in_batch`: so each token weighs as in the whole batch. A loss function of (inputs,
    targets) must return (sum, weight) for the same.

    Args:
        batch: rows of a step; the last batch may have fewer.
        most_tokens: of a microbatch, padding included: the limit of memory.
        num_stages: of the pipeline.
        seconds: (rows, length) -> predicted time of a microbatch; None: about 4 microbatches a stage.
        least: the least number of microbatches, such as the number of replicas.
        next_token: whether the model predicts the next token, so that a row's first label does not count.

    Raises:
        BatchError: fields of a row differ in length.
        ConfigError: a row has more tokens than `most_tokens`.
    """
    from ..planning.unequal import group_rows  # few jobs plan

    refuse_below(1, batch=batch, most_tokens=most_tokens, num_stages=num_stages)
    each = iter(rows)
    while taken := list(islice(each, batch)):
        fields = [_fields(row) for row in taken]
        lengths = [_length(row, number) for number, row in enumerate(fields)]
        time = seconds or partial(_tokens, sum(lengths) / (_A_STAGE**2 * num_stages))
        groups = group_rows(lengths, time, most_tokens=most_tokens, num_stages=num_stages, least=least)
        made = [_padded([fields[row] for row in group]) for group in groups]
        if isinstance(taken[0], Mapping):
            counted = _counted(fields, next_token)
            yield SplitBatch({**microbatch, **counted} for microbatch in made)
        else:
            yield SplitBatch((microbatch["inputs"], microbatch["targets"]) for microbatch in made)


def _tokens(fixed: float, rows: int, length: int) -> float:
    return fixed + rows * length


def _fields(row: Row) -> dict[str, Tensor]:
    named = row if isinstance(row, Mapping) else dict(zip(("inputs", "targets"), row, strict=True))
    return {name: torch.as_tensor(value) for name, value in named.items()}


def _length(row: Mapping[str, Tensor], number: int) -> int:
    lengths = {name: len(field) for name, field in row.items() if field.dim()}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no field with a length"
        raise BatchError(f"rows: row {number} of a batch has {found}; needs fields of one length: pad or cut them")
    return next(iter(lengths.values()))


def _counted(rows: Sequence[Mapping[str, Tensor]], next_token: bool) -> dict[str, Tensor]:
    """Return the number of labels of a batch that count, by its name; nothing if there are no labels of tokens."""
    if any("labels" not in row or not row["labels"].dim() for row in rows):
        return {}
    return {NUM_ITEMS: torch.stack([(row["labels"][int(next_token) :] != IGNORED).sum() for row in rows]).sum()}


def _padded(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the fields of a microbatch, and the mask of their padding."""
    ones = [torch.ones(len(next(field for field in row.values() if field.dim())), dtype=torch.int64) for row in rows]
    made = {"attention_mask": pad_sequence(ones, batch_first=True)}
    for name, first in rows[0].items():
        fields = [row[name] for row in rows]
        pad = IGNORED if name in ("labels", "targets") else 0
        made[name] = pad_sequence(fields, batch_first=True, padding_value=pad) if first.dim() else torch.stack(fields)
    return made
