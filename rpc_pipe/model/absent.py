"""Tensors that have a shape, a type and a device, and no numbers.

Around torch's fake tensors, which do the arithmetic of shapes; models recognise those and then take another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes

from .trees import leaves, replaced, tensors

#: what an operator raises whose result, or its shape, depends on numbers
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Absent(Tensor):
    """A tensor whose numbers are elsewhere, or do not matter."""

    fake: FakeTensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, fake: FakeTensor) -> Absent:
        return Tensor._make_wrapper_subclass(
            cls, fake.shape, strides=fake.stride(), storage_offset=fake.storage_offset(),
            dtype=fake.dtype, layout=fake.layout, device=fake.device,
        )  # fmt: skip

    def __init__(self, fake: FakeTensor) -> None:
        self.fake = fake

    def _exchange(self, value: Absent) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.fake = value.fake

    data = property(lambda self: self.detach(), _exchange)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return on_shapes(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        made = self.detach().clone()
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made  # type: ignore[return-value]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def on_shapes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operator; what it makes of absent tensors is absent."""
    wrapped: dict[int, Absent] = {}

    def inner(value: Any) -> Any:
        if isinstance(value, Absent):
            wrapped[id(value.fake)] = value
            return value.fake
        if isinstance(value, (tuple, list)):
            return type(value)(map(inner, value))
        return value

    def outer(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            same = wrapped.get(id(value))
            if same is not None and same.shape != value.shape:
                raise NotImplementedError(f"{func} changes the shape of a tensor in place")
            return same if same is not None else Absent(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(outer, value))
        return value

    return outer(func(*map(inner, args), **{name: inner(value) for name, value in kwargs.items()}))


class Shapes:
    """Makes absent tensors that may be used together."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: Tensor, device: torch.device | None = None) -> Absent:
        """Return an absent tensor that looks like `tensor`."""
        with _disable_current_modes(), torch.no_grad(), self.mode:  # nobody observes this
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )
        assert isinstance(made, FakeTensor)
        return Absent(made)

    def without_numbers(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator that makes tensors from nothing."""
        with self.mode:
            made = func(*args, **kwargs)
        return Absent(made) if isinstance(made, FakeTensor) else made


def storage_of(tensor: Tensor) -> int:
    """Return what tensors share if one is a view of the other."""
    try:
        return int((tensor.fake if isinstance(tensor, Absent) else tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other layouts have none
        return id(tensor)


def written(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments that it changes in place."""
    if not operator._schema.is_mutable:
        return []
    arguments = operator._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    return [t for a, tree in given if a.alias_info is not None and a.alias_info.is_write for t in tensors(tree)]


def numbers(tensor: Tensor) -> Tensor:
    """Return some numbers of the form of a tensor that has none."""
    with _disable_current_modes(), torch.no_grad():
        made = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if made.is_floating_point():
            made.normal_(0, 0.02)
    return made.requires_grad_(tensor.requires_grad)


def on_ones(func: Any, args: Any, kwargs: Any, shapes: Shapes) -> Any:
    """Run an operator on ones, where it does not know shapes alone."""
    absent = {path: t for path, t in leaves((args, kwargs)) if isinstance(t, Absent)}
    ones = {path: torch.ones(t.shape, dtype=t.dtype, device=t.device) for path, t in absent.items()}
    args, kwargs = replaced((args, kwargs), ones)
    result = func(*args, **kwargs)
    return replaced(result, {path: shapes.like(tensor) for path, tensor in leaves(result)})


def without_masks(indices: Any) -> list[Any]:
    """Return indices with masks whose numbers are known replaced by the places they choose."""
    known: list[Any] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool and not isinstance(index, Absent):
            known += index.nonzero(as_tuple=True)
        else:
            known.append(index)
    return known
