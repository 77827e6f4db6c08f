"""Placeholders for the fields of a batch that a stage does not read from storage.

They have the field's shape and refuse all computation, so a stage that needs the field after all is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .placeholder import Placeholder
from .skeleton import Skeleton
from .trees import Path, replaced

#: path of a field that is not read -> its shape and dtype
UnreadForms = Mapping[Path, tuple[torch.Size, torch.dtype]]


class FieldNeeded(BaseException):
    """A forward needs the data of a field that is not read here. A BaseException, so that no model catches it."""


class UnreadField(Placeholder):
    """A placeholder for a field that is not read here: it has a shape, and no operator runs on it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise FieldNeeded(f"{func} takes a field that is not read here")


def filled(skeleton: Skeleton, tree: Any, unread: UnreadForms) -> Any:
    """Return `tree`, (args, kwargs), with placeholders for the fields that are not read."""
    forms = {path: torch.empty(shape, dtype=dtype, device="meta") for path, (shape, dtype) in unread.items()}
    make = skeleton.placeholders.like
    return replaced(tree, {path: make(form, skeleton.device, UnreadField) for path, form in forms.items()})


def copy_of(field: Tensor) -> Tensor:
    """Return a copy of a field that a forward may write; unread fields are never written."""
    return field if isinstance(field, UnreadField) else field.clone()


def observable(field: Tensor) -> Tensor:
    """Return a copy of a field for an observation, in place of an unread field an ordinary placeholder."""
    return field.factory.like(field) if isinstance(field, UnreadField) else field.clone()
