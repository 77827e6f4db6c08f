"""Tensors that have a shape, a type and a device, and no numbers.

Meta tensors do the arithmetic of shapes where they know it; else torch's fake tensors do, which know devices and refuse
what needs numbers. Models recognise fake tensors and then take another way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
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

from .of_shapes import CONSTRUCTORS, OPERATORS
from .trees import leaves, replaced, tensors

#: what an operator raises whose result, or its shape, depends on numbers
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_CONVOLUTION = torch.ops.aten.convolution.default
#: attributes that an absent tensor has, whoever made it
_OWN_ATTRIBUTES = frozenset({"shapes", "_forms", "_is_param"})
#: what normalisation in training moves
_RUNNING = frozenset({"running_mean", "running_var"})


class Absent(Tensor):
    """A tensor whose numbers are elsewhere, or do not matter.

    Args:
        form: a meta tensor, or a fake one, which has its form and the storage that it shares with its views.
        device: of a meta tensor.
        shapes: what it may be used together with.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, form: Tensor, device: torch.device, shapes: Shapes) -> Absent:
        return Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), storage_offset=form.storage_offset(),
            dtype=form.dtype, layout=form.layout, device=device,
        )  # fmt: skip

    def __init__(self, form: Tensor, device: torch.device, shapes: Shapes) -> None:
        self.shapes = shapes
        self._forms: tuple[Tensor | None, FakeTensor | None] = (
            (None, form) if isinstance(form, FakeTensor) else (form, None)
        )

    @property
    def form(self) -> Tensor:
        """Some tensor of the same shape, whose storage is the same for all views."""
        meta, fake = self._forms
        return meta if fake is None else fake  # type: ignore[return-value]

    @property
    def fake(self) -> FakeTensor:
        """The same as torch's fake tensor, always the same one."""
        meta, fake = self._forms
        if fake is None:
            assert meta is not None
            with _unobserved():
                fake = FakeTensor(self.shapes.fake_mode, meta, self.device)
            self._forms = meta, fake
        return fake

    @property
    def meta(self) -> Tensor:
        """The same as a meta tensor, always the same one."""
        meta, fake = self._forms
        if meta is None:
            assert fake is not None
            with _unobserved():
                meta = torch.empty(0, dtype=fake.dtype, device="meta")
                meta.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())
            self._forms = meta, fake
        return meta

    def _exchange(self, value: Absent) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._forms = value._forms

    data = property(lambda self: Tensor.data.__get__(self), _exchange)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.equal.default:
            # What modules hold is compared with what they held before; what is elsewhere is changed elsewhere.
            return all(isinstance(each, Absent) and each.shape == args[0].shape for each in args)
        return on_shapes(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        made = self.detach().clone()
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made  # type: ignore[return-value]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def on_shapes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operator; what it makes of absent tensors is absent."""
    if func in OPERATORS:
        made = _on_meta(func, args, kwargs)
        if made is not NotImplemented:
            return made
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
            if same is None:
                return Absent(value, value.device, next(iter(wrapped.values())).shapes)
            if same.shape != value.shape or same.stride() != value.stride():  # as transpose_() does
                with _unobserved():
                    same.data = Absent(value, value.device, same.shapes)
            return same
        if isinstance(value, (tuple, list)):
            return type(value)(map(outer, value))
        return value

    return outer(func(*map(inner, args), **{name: inner(value) for name, value in kwargs.items()}))


class _OtherKindError(Exception):
    pass


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of `OPERATORS` on meta tensors; NotImplemented if that would not show what happens."""
    takes_numbers = OPERATORS[func]
    known: dict[int, Absent] = {}
    others: list[Tensor] = []

    def inner(value: Any) -> Any:
        if isinstance(value, Absent):
            meta = value.meta
            known[id(meta)] = value
            return meta
        if isinstance(value, Tensor):
            if not takes_numbers or type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
                raise _OtherKindError
            others.append(value)
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(map(inner, value))
        return value

    def outer(value: Any) -> Any:
        if isinstance(value, Tensor):
            same = known.get(id(value))
            return Absent(value, like.device, like.shapes) if same is None else same
        if isinstance(value, (tuple, list)):
            return type(value)(map(outer, value))
        return value

    if kwargs.get("device") is not None or kwargs.get("pin_memory"):
        return NotImplemented
    try:
        args, kwargs = [inner(value) for value in args], {name: inner(value) for name, value in kwargs.items()}
        if not known:
            return NotImplemented
        like = next(iter(known.values()))
        if any(tensor.device != like.device for tensor in (*known.values(), *others)):
            return NotImplemented
        if func is _CONVOLUTION and not all(tensor.is_contiguous() for tensor in args[:2]):
            return NotImplemented  # its memory format depends on the device
        return outer(func(*args, **kwargs))
    except (_OtherKindError, NotImplementedError):
        return NotImplemented


class Shapes:
    """Makes absent tensors that may be used together."""

    @cached_property
    def fake_mode(self) -> FakeTensorMode:
        """What fake tensors belong to; made when one is needed, since it imports the compiler."""
        return FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: Tensor, device: torch.device | None = None, kind: type[Absent] = Absent) -> Absent:
        """Return an absent tensor that looks like `tensor`."""
        device = device or tensor.device
        with _unobserved(), torch.no_grad():
            if device.type == "cpu":
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                return kind(meta, device, self)
            with self.fake_mode:  # which knows a device that was not numbered
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return kind(made, made.device, self)

    def parameter_like(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Return an absent parameter that looks like `parameter`."""
        made = self.like(parameter, device)
        if parameter.requires_grad:
            made.requires_grad_()
        made._is_param = True  # as nn.Parameter does, without another view
        vars(made).update(attributes_of(parameter))
        return made  # type: ignore[return-value]

    def without_numbers(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator that makes tensors from nothing."""
        device = kwargs.get("device")
        if func in CONSTRUCTORS and (device is None or device.type == "cpu"):
            return Absent(func(*args, **{**kwargs, "device": "meta"}), device or torch.device("cpu"), self)
        with self.fake_mode:
            made = func(*args, **kwargs)
        return Absent(made, made.device, self) if isinstance(made, FakeTensor) else made


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that someone has given a parameter, such as `no_weight_decay`."""
    return {name: value for name, value in vars(parameter).items() if name not in _OWN_ATTRIBUTES}


def _unobserved() -> AbstractContextManager[None]:
    """Return a context in which no mode sees what is done."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def storage_of(tensor: Tensor) -> int:
    """Return what tensors share if one is a view of the other."""
    try:
        return int((tensor.form if isinstance(tensor, Absent) else tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other layouts have none
        return id(tensor)


def written(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments that it changes in place."""
    arguments = operator._schema.arguments
    if operator._schema.is_mutable:
        names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    else:
        names = [a.name for a in arguments if a.name in _RUNNING]  # of which torch's schemas do not tell
    if not names:
        return []
    given = {a.name: tree for a, tree in zip(arguments, args, strict=False)} | kwargs
    moves = operator._schema.is_mutable or given.get("training", True)
    return [tensor for name in names if moves and name in given for tensor in tensors(given[name])]


def draws_at_random(operator: Any, kwargs: Any) -> bool:
    """Tell whether an operator may draw random numbers; by a generator of its own it draws the same anywhere."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()) and kwargs.get("generator") is None


def numbers(tensor: Tensor) -> Tensor:
    """Return some numbers of the form of a tensor that has none."""
    with _unobserved(), torch.no_grad():
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


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging operators that know no shapes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was
