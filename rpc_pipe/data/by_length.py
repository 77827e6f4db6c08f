"""Rows of different lengths, put into microbatches by length and padded within a microbatch alone."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..dependency import BatchError, refuse_below

from ..model.batches.microbatches import (  # isort: skip
    IGNORED, LazyBatch, Microbatches, Pair, SplitBatch, count_tokens, labels_of,
)  # fmt: skip
from ..model.batches.own_rows import LengthNeeds, OwnRows, lazy_microbatches
from ..workers.compute.result import NUM_ITEMS
from ..workers.transport.payload import Tree

#: a row: tensors or lists of numbers by name, or (inputs, targets)
Row = Mapping[str, Any] | Sequence[Any]
#: microbatches for each stage, about, where time follows tokens
_A_STAGE = 4


def batches_by_length(
    rows: Iterable[Row] | Mapping[str, Sequence[Any]],
    *,
    batch: int,
    most_tokens: int,
    num_stages: int,
    seconds: Callable[[int, int], float] | None = None,
    least: int = 1,
    next_token: bool = True,
) -> Iterator[SplitBatch]:
    """Yield batches for `Pipeline.step` and `train`, in microbatches with rows of similar length.

    Fields of a row with one dimension share the row's length and are padded to the microbatch's longest row: labels and
    targets by -100, the rest by 0. Named rows get an `attention_mask`, and with labels of tokens the batch's number of
    labels that count, `num_items_in_batch`: so each token weighs as in the whole batch. A loss function of (inputs,
    targets) must return (sum, weight) for the same.

    Args:
        rows: dicts of lists of numbers or tensors, or (inputs, targets); or a dict of lists of all rows, as a tokenizer
            gives.
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
    refuse_below(1, batch=batch, most_tokens=most_tokens, num_stages=num_stages)
    if isinstance(rows, Mapping):  # a list of rows by each name, as a tokenizer gives
        if len({*(found := {name: len(column) for name, column in rows.items()}).values()}) > 1:
            raise BatchError(f"rows: columns of {found} rows: must have as many; give each row all fields")
        rows = map(dict, map(partial(zip, list(rows)), zip(*rows.values(), strict=True)))
    how, each = LengthNeeds(num_stages, least, 1), iter(rows)
    while taken := list(islice(each, batch)):
        lengths = tuple(_length(row, number) for number, row in enumerate(taken))
        groups = group(lengths, how, most_tokens, seconds)
        if isinstance(taken[0], Mapping):
            counted = _counted(taken, next_token)
            yield SplitBatch({**side, **counted} for side in _sides(taken, lengths, groups))
        else:
            inputs, targets = zip(*taken, strict=True)
            pairs = _sides(inputs, lengths, groups), _sides(targets, lengths, groups, are_targets=True)
            yield SplitBatch(zip(*pairs, strict=True))


def grouped(
    batch: LazyBatch,
    sides: tuple[Sequence[Any] | None, Sequence[Any] | None],
    lengths: tuple[int, ...],
    pair: Pair,
    how: LengthNeeds,
    most_tokens: int,
    next_token: bool,
    counted: Sequence[int] | None = None,
    own: OwnRows | None = None,
) -> Microbatches:
    """Return the rows of a batch as microbatches of rows of similar length, padded to the longest.

    Args:
        sides: inputs and targets of each row; None: this worker uses none.
        lengths: tokens of each row; counted: their labels that count, if known.
        pair: of the model: splits a microbatch into (inputs, targets).
        own: rows of these microbatches alone are in `sides`, in their order; None: of all rows in the given order.

    Raises:
        BatchError: a field of a row has another length than in `lengths`, or another count of labels than in `counted`.
    """
    groups = group(lengths, how, most_tokens, how.seconds)
    here = None if own is None else own.microbatches(len(groups))
    inputs = _sides(sides[0], lengths, groups, here=here)
    targets = _sides(sides[1], lengths, groups, are_targets=True, here=here)
    shift = int(next_token and how.loss_is_inside)
    weights = [len(rows) if counted is None else sum(counted[row] for row in rows) for rows in groups]
    for number in (read := here or range(len(groups))):
        of_group = _labels(inputs[number], targets[number])
        found = weights[number] if of_group is None else int((of_group[:, shift:] != IGNORED).sum())
        if counted is not None and found != weights[number]:
            raise BatchError(f"counted: {weights[number]} labels of a microbatch count, but {found} are not {IGNORED}")
        weights[number] = found
        inputs[number], targets[number] = pair((inputs[number], targets[number]))
    shares = [weight / (sum(weights) or 1) for weight in weights]
    sizes = [(len(group), max(lengths[row] for row in group)) for group in groups]
    count = count_tokens(*([side[number] for number in read] for side in (inputs, targets)))
    share = sum(map(math.prod, sizes)) / sum(math.prod(sizes[number]) for number in read)
    whole = count._replace(tokens=round(count.tokens * share))
    label = f"{batch.label}, in microbatches {crc32(repr((groups, sizes)).encode()):x}"
    return replace(lazy_microbatches(batch, inputs, targets, shares, whole, label), sizes=sizes)


@lru_cache(64)  # a batch that is read ahead is grouped for its rows, and once more when it is taken
def group(
    lengths: tuple[int, ...], how: LengthNeeds, most_tokens: int, seconds: Callable[[int, int], float] | None
) -> list[list[int]]:
    """Return the rows of each microbatch, given their lengths."""
    from ..planning.unequal import group_rows  # few jobs plan

    fixed = sum(lengths) / (_A_STAGE**2 * how.num_stages)
    time = seconds or (lambda rows, length: fixed + rows * length)
    needs = {"num_stages": how.num_stages, "least": how.least, "multiple": how.multiple}
    return group_rows(lengths, time, most_tokens=most_tokens, **needs)


def _sides(
    rows: Sequence[Any] | None,
    lengths: Sequence[int],
    groups: Sequence[Sequence[int]],
    are_targets: bool = False,
    here: Sequence[int] | None = None,
) -> list[Tree]:
    """Return the inputs or the targets of microbatches; None for each without `rows`.

    Args:
        here: the microbatches with rows here, in their order; None: all rows, in the given order.
    """
    if rows is None:
        return [None] * len(groups)
    found = rows if here is None else dict(zip((row for n in here for row in groups[n]), rows, strict=True))
    here = range(len(groups)) if here is None else here
    kept = [group if number in here else [] for number, group in enumerate(groups)]
    return [joined([found[r] for r in own], [lengths[r] for r in own], are_targets) if own else None for own in kept]


def joined(rows: Sequence[Any], lengths: Sequence[int], are_targets: bool = False) -> Tree:
    """Return the inputs or the targets of rows as tensors, padded to the longest row.

    Named inputs get the mask of their padding.

    Raises:
        BatchError: a field of a row differs from its length in `lengths`.
    """
    if not isinstance(rows[0], Mapping):
        return _column("targets" if are_targets else "inputs", rows, lengths, are_targets)
    values = {name: [row[name] for row in rows] for name in rows[0]}
    made = {name: _column(name, each, lengths, are_targets or name == "labels") for name, each in values.items()}
    mask = [torch.ones(length, dtype=torch.int64) for length in lengths]
    return made if are_targets else {"attention_mask": pad_sequence(mask, batch_first=True), **made}


def _column(name: str, values: Sequence[Any], lengths: Sequence[int], are_labels: bool) -> Tensor:
    """Return a field of all rows; it is padded if it has the rows' lengths."""
    fields = list(map(torch.as_tensor, values))
    found = [len(field) if field.dim() else 0 for field in fields]
    if found == list(lengths):
        # A mean over labels without whole numbers would count padding, unnoticed.
        ignored = float("nan") if fields[0].is_floating_point() else IGNORED
        pad = ignored if are_labels else 0
        return pad_sequence(fields, batch_first=True, padding_value=pad)
    if len({field.shape for field in fields}) > 1:
        length, other = next(each for each in zip(lengths, found, strict=True) if each[0] != each[1])
        raise BatchError(f"lengths: a row of length {length} has {name} of {other}; must be the lengths of the rows")
    return torch.stack(fields)


def _labels(inputs: Tree, targets: Tree) -> Tensor | None:
    """Return the labels of the tokens of a microbatch; None if there are none."""
    labels = labels_of(inputs, targets)
    return labels if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point() else None


def _length(row: Row, number: int) -> int:
    try:
        named = row.items() if isinstance(row, Mapping) else zip(("inputs", "targets"), row, strict=True)
        tensors = {name: torch.as_tensor(value) for name, value in named}
    except (TypeError, ValueError) as error:
        kind = "not a dict or (inputs, targets) of numbers; leave fields of text out"
        raise BatchError(f"rows: row {number} of a batch is {kind}") from error
    lengths = {name: len(field) for name, field in tensors.items() if field.dim()}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no field with a length"
        raise BatchError(f"rows: row {number} of a batch has {found}; needs fields of one length: pad or cut them")
    return next(iter(lengths.values()))


def _counted(rows: Sequence[Any], next_token: bool) -> dict[str, Tensor]:
    """Return the number of labels of a batch that count, by its name; nothing if there are no labels of tokens."""
    labels = [torch.as_tensor(row.get("labels", 0)) for row in rows]
    if any(not each.dim() for each in labels):
        return {}
    return {NUM_ITEMS: torch.stack([(each[int(next_token) :] != IGNORED).sum() for each in labels]).sum()}
