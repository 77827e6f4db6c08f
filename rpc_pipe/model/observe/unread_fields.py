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

#: most placeholders that are kept
_MAX_PLACEHOLDERS = 512


class FieldNeeded(BaseException):
    """A forward needs the data of a field that is not read here. A BaseException, so that no model catches it."""


class UnreadField(Placeholder):
    """A placeholder for a field that is not read here: it has a shape, and no operator runs on it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise FieldNeeded(f"{func} takes a field that is not read here")


class UnreadFieldFiller:
    """Fills the places of fields that are not read with placeholders, the same for each path, shape and dtype."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._known: dict[Any, Tensor] = {}

    def filled(self, tree: Any, unread: UnreadForms) -> Any:
        """Return `tree`, (args, kwargs), with placeholders for the unread fields."""
        stand_ins = {}
        for path, (shape, dtype) in unread.items():
            found = self._known.get((path, shape, dtype))
            if found is None:
                if len(self._known) == _MAX_PLACEHOLDERS:
                    self._known.clear()
                form = torch.empty(shape, dtype=dtype, device="meta")
                found = self._skeleton.placeholders.like(form, self._skeleton.device, UnreadField)
                self._known[path, shape, dtype] = found
            stand_ins[path] = found
        return replaced(tree, stand_ins)


def copy_of(field: Tensor) -> Tensor:
    """Return a copy of a field that a forward may write; unread fields are never written."""
    return field if isinstance(field, UnreadField) else field.clone()


def observable(field: Tensor) -> Tensor:
    """Return a copy of a field for an observation, in place of an unread field an ordinary placeholder."""
    return field.factory.like(field) if isinstance(field, UnreadField) else field.clone()
