"""Loaders and lists of batches in the place of a batch: how they are recognised, and refused."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from ...dependency import BatchError
from .microbatches import LazyBatch, SplitBatch, form_of

#: batches themselves, though they can be iterated over
_BATCHES = (Tensor, tuple, list, Mapping, str, bytes, LazyBatch)


#: whether a model could take a list of containers as one batch
CouldBeOne = Callable[[Sequence[Any]], bool]


def has_batches(given: Any, known: Any, could_be_one: CouldBeOne) -> bool | None:
    """Return whether `given` has batches; None: its form does not show it."""
    if type(given) not in (tuple, list):
        return isinstance(given, Iterable) and not isinstance(given, _BATCHES) and not is_dataclass(given)
    if all(isinstance(each, (SplitBatch, LazyBatch)) for each in given):
        return True
    if not all(isinstance(each, (Mapping, tuple, list)) or is_dataclass(each) for each in given):
        return False  # such as a pair of tensors
    forms = [form_of(each) for each in given]
    as_one, as_many = form_of(given) == known, all(form == known for form in forms)
    if as_one != as_many:
        return as_many
    if all(isinstance(each, Mapping) for each in given):
        if any(each.keys() != given[0].keys() for each in given):
            return None if set.intersection(*(set(each) for each in given)) else False
    elif any(form != forms[0] for form in forms):
        return not could_be_one(given)
    return None if could_be_one(given) else True


def refuse_batches(call: str, given: Any, could_be_one: CouldBeOne) -> None:
    """Refuse a loader, or a list of batches, in the place of one batch.

    Raises:
        BatchError: it is one.
    """
    if has_batches(given, None, could_be_one):
        what = f"{type(given).__name__}" + (f" of {len(given)} batches" if isinstance(given, (list, tuple)) else "")
        raise BatchError(f"{call}: takes one batch, and was given a {what}; call it for each")


def refuse_batch(given: Any) -> None:
    """Refuse one batch in the place of a loader.

    Raises:
        BatchError: it is one.
    """
    if isinstance(given, (Tensor, Mapping, str, LazyBatch, SplitBatch)) or not isinstance(given, Iterable):
        raise BatchError(f"train: takes batches one after the other, not a {type(given).__name__}; pass [batch]")
