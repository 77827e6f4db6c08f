"""What stands for the fields of a batch that a stage does not read: tensors of their form that refuse all else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from .absent import Absent
from .skeleton import Skeleton
from .trees import Path, replaced

#: places of fields that are not read -> their shapes and types
Unread = Mapping[Path, tuple[torch.Size, torch.dtype]]

#: forms for which something is kept
_MOST_FORMS = 512


class NeedsField(BaseException):
    """A forward wants numbers of a field that is not read here; not an Exception, so that no model swallows it."""


class Hollow(Absent):
    """What stands for a field that is not read here, or for something made of it: it has a form that may be asked for,
    and nothing is computed of it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NeedsField(f"{func} takes a field that is not read here")


class StandIns:
    """Puts something hollow in the places of fields that are not read, always the same for a place and form."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._known: dict[Any, Tensor] = {}

    def filled(self, tree: Any, unread: Unread) -> Any:
        """Return `tree`, (args, kwargs), with something hollow in those places."""
        hollow = {}
        for path, (shape, dtype) in unread.items():
            found = self._known.get((path, shape, dtype))
            if found is None:
                if len(self._known) == _MOST_FORMS:
                    self._known.clear()
                form = torch.empty(shape, dtype=dtype, device="meta")
                found = self._skeleton.shapes.like(form, self._skeleton.device, Hollow)
                self._known[path, shape, dtype] = found
            hollow[path] = found
        return replaced(tree, hollow)


def copy_of(field: Tensor) -> Tensor:
    """Return a copy of a field that a forward may write; nothing writes what is hollow."""
    return field if isinstance(field, Hollow) else field.clone()


def observable(field: Tensor) -> Tensor:
    """Return a copy of a field, for an observation; of one that is not read, something without numbers."""
    return field.shapes.like(field) if isinstance(field, Hollow) else field.clone()


def said(tree: Any) -> Any:
    """Return what can be compared of a call's arguments: all but the tensors. What cannot differs each time."""
    if isinstance(tree, Tensor):
        return Tensor
    if isinstance(tree, float):
        return repr(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree), tuple([said(child) for child in tree])
    if isinstance(tree, dict):
        return dict, tuple([(name, said(child)) for name, child in tree.items()])
    if isinstance(tree, slice):
        return slice, said(tree.start), said(tree.stop), said(tree.step)
    return tree if isinstance(tree, Hashable) else object()
