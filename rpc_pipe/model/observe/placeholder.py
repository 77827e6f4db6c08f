"""Placeholders: tensors with a shape, a dtype and a device, but without data.

They stand for parameters and activations of other stages. Results have the shapes that torch's fake tensors compute,
which know devices and refuse operators that need data. The placeholders have a separate class because models
recognise fake tensors and then behave differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .model_kinds import attributes_of
from .trees import leaves, replaced, tensors

#: errors of operators with a result, or a shape, that depends on data
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
#: operators that torch does not run on shapes; their outputs have the same shape for all numbers
ALIKE = {torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor}
#: nn.TransformerEncoder's question whether to take a way in evaluation that it never takes under a function mode
LOOKS_AT_MASK = torch._nested_tensor_from_mask_left_aligned
#: arguments that batch normalisation writes in training, which torch's schemas do not declare
_RUNNING = frozenset({"running_mean", "running_var"})
#: call of an operator, by forms -> None or the type of its list of results, and for each result (number of the
#: placeholder that it is a view of, or None; its form)
_KNOWN: dict[Any, tuple[Any, list[Any]]] = {}
#: calls in it; a model has some hundreds for each length
_MOST_KNOWN = 10_000


class Placeholder(Tensor):
    """A tensor with data on another worker, or with data that do not matter.

    Args:
        fake: a fake tensor of the same shape; views share its storage.
        factory: makes tensors that it may be used with.
    """

    of_another_worker = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, fake: FakeTensor, factory: PlaceholderFactory) -> Placeholder:
        return Tensor._make_wrapper_subclass(
            cls, fake.shape, strides=fake.stride(), storage_offset=fake.storage_offset(),
            dtype=fake.dtype, layout=fake.layout, device=fake.device,
        )  # fmt: skip

    def __init__(self, fake: FakeTensor, factory: PlaceholderFactory) -> None:
        self.fake, self.factory = fake, factory

    def _exchange(self, value: Placeholder) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.fake = value.fake

    data = property(lambda self: Tensor.data.__get__(self), _exchange)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.equal.default:
            # State is compared with earlier state. That of other workers is compared there, so here it counts as equal.
            return all(isinstance(each, Placeholder) and each.shape == args[0].shape for each in args)
        return on_shapes(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        made = self.detach().clone()
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made  # type: ignore[return-value]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def on_shapes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operator on shapes; results of placeholders are placeholders."""
    given: list[Placeholder] = []
    call = func, torch.get_default_dtype(), _form(args, given), _form(tuple(kwargs.items()), given)
    if not given:
        return func(*args, **kwargs)
    factory = given[0].factory
    if (known := _KNOWN.get(call)) is not None:
        made = [factory.of(None if i is None else given[i], *form) for i, *form in known[1]]
        return made[0] if known[0] is None else known[0](made)
    wrapped = {id(tensor.fake): tensor for tensor in given}

    def inner(tensor: Tensor) -> Tensor:
        return tensor.fake if isinstance(tensor, Placeholder) else tensor

    def outer(tensor: Tensor) -> Tensor:
        same = wrapped.get(id(tensor))
        if not isinstance(tensor, FakeTensor):
            return tensor
        if same is None:
            return Placeholder(tensor, factory)
        if same.shape != tensor.shape or same.stride() != tensor.stride():  # as transpose_() does
            with unobserved():
                same.data = Placeholder(tensor, same.factory)
        return same

    args, kwargs = _each(args, inner), {name: _each(value, inner) for name, value in kwargs.items()}
    result = _each(func(*args, **kwargs), outer)
    if not func._schema.is_mutable:  # type: ignore[attr-defined]
        _learn(call, given, result)
    return result


def _form(value: Any, given: list[Placeholder]) -> Any:
    """Return the form of an operator's argument, from which that of the result follows; list its placeholders."""
    if isinstance(value, (tuple, list)):
        return tuple([_form(each, given) for each in value])
    if not isinstance(value, Tensor):
        # 1 and 1.0 are equal, and give other dtypes; an object is unlike any other
        return (type(value), value) if isinstance(value, Hashable) else object()
    if isinstance(value, Placeholder):
        given.append(value)
    if value.layout is not torch.strided or value.is_nested:
        return object()
    return type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


def _learn(call: Any, given: list[Placeholder], result: Any) -> None:
    """Keep the forms of an operator's results, if each is a new tensor or a view of an argument.

    A fake tensor takes 0.15 ms, most of it to find its form in torch's cache, and those of a batch norm 3 ms.
    """
    results = [result] if isinstance(result, Tensor) else result
    if not isinstance(results, (tuple, list)) or not all(type(each) is Placeholder for each in results):
        return
    storages, found = [storage_of(each) for each in given], list[Any]()
    for each in results:
        storage = storage_of(each)
        source = storages.index(storage) if storage in storages[: len(given)] else None
        is_odd = each.layout is not torch.strided or each.is_complex() or any(each is tensor for tensor in given)
        if is_odd or (source is None and (each.storage_offset() or storage in storages)):
            return
        storages.append(storage)
        found.append((source, each.shape, each.stride(), each.storage_offset(), each.dtype, each.device))
    if len(_KNOWN) == _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[call] = None if results is not result else type(result), found


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an operator's argument, or its result, with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_each(child, change) for child in value])
    return value


class PlaceholderFactory:
    """Makes placeholders that may be used together."""

    @cached_property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of fake tensors, made on first use, since it imports the compiler."""
        return FakeTensorMode(allow_non_fake_inputs=True)

    def like(
        self,
        tensor: Tensor,
        device: torch.device | None = None,
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Placeholder:
        """Return a placeholder of the dtype of `tensor`, and of its shape and strides unless these are given."""
        shape, strides = tensor.shape if shape is None else shape, tensor.stride() if strides is None else strides
        return self.of(None, shape, strides, 0, tensor.dtype, device or tensor.device)

    def of(
        self,
        source: Placeholder | None,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Placeholder:
        """Return a placeholder of a form; of a view of `source`, unless that is None."""
        with unobserved(), torch.no_grad():
            if source is None:
                made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            else:
                made = torch.empty(0, dtype=dtype, device="meta")
                made.set_(source.fake.untyped_storage(), offset, shape, strides)
            # without its mode, which takes several times as long for a new shape
            return Placeholder(FakeTensor(self.fake_mode, made, device), self)

    def parameter_like(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Return a placeholder for `parameter`, with its attributes."""
        made = self.like(parameter, device)
        if parameter.requires_grad:
            made.requires_grad_()
        made._is_param = True  # nn.Parameter sets it, too, but would also make another view
        vars(made).update(attributes_of(parameter))
        return made  # type: ignore[return-value]

    def construct(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator without tensor arguments, such as `zeros`; its result is a placeholder."""
        with self.fake_mode:
            made = func(*args, **kwargs)
        return Placeholder(made, self) if isinstance(made, FakeTensor) else made


def unobserved() -> AbstractContextManager[None]:
    """Return a context that hides operators from dispatch modes."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def storage_of(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which its views share."""
    try:
        return int((tensor.fake if isinstance(tensor, Placeholder) else tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other layouts have none
        return id(tensor)


def written(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator writes in place."""
    arguments = operator._schema.arguments
    if operator._schema.is_mutable:
        names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    else:
        names = [a.name for a in arguments if a.name in _RUNNING]
    if not names:
        return []
    given = {a.name: tree for a, tree in zip(arguments, args, strict=False)} | kwargs
    moves = operator._schema.is_mutable or given.get("training", True)
    return [tensor for name in names if moves and name in given for tensor in tensors(given[name])]


def draws_at_random(operator: Any, kwargs: Any) -> bool:
    """Return whether an operator draws from the default generator."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()) and kwargs.get("generator") is None


def random_like(tensor: Tensor) -> Tensor:
    """Return a tensor with random data of the shape of a placeholder."""
    with unobserved(), torch.no_grad():
        made = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if made.is_floating_point():
            made.normal_(0, 0.02)
    return made.requires_grad_(tensor.requires_grad)


def on_ones(func: Any, args: Any, kwargs: Any, factory: PlaceholderFactory) -> Any:
    """Run an operator that cannot run on shapes with ones in place of placeholders."""
    placeholders = {path: t for path, t in leaves((args, kwargs)) if isinstance(t, Placeholder)}
    ones = {path: torch.ones(t.shape, dtype=t.dtype, device=t.device) for path, t in placeholders.items()}
    args, kwargs = replaced((args, kwargs), ones)
    result = func(*args, **kwargs)
    return replaced(result, {path: factory.like(tensor) for path, tensor in leaves(result)})


def without_masks(indices: Any) -> list[Any]:
    """Return indices with boolean masks that have data replaced by index tensors."""
    known: list[Any] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool and not isinstance(index, Placeholder):
            known += index.nonzero(as_tuple=True)
        else:
            known.append(index)
    return known


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging operators that cannot run on shapes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was
