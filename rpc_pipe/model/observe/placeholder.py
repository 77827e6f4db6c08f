"""Placeholders: tensors with a shape, a dtype and a device, but without data.

They stand for parameters and activations of other stages. Results have the shapes that torch's meta tensors compute
where these are enough, and those of torch's fake tensors elsewhere, which know devices and refuse operators that need
data. The placeholders are of a class of their own because models recognise fake tensors and then behave differently.
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
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes

from .given import attributes_of
from .trees import leaves, replaced, tensors

#: errors of operators whose result, or its shape, depends on data
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_CONVOLUTION = torch.ops.aten.convolution.default
#: nn.TransformerEncoder's question whether to take a way in evaluation that it never takes under a function mode
LOOKS_AT_MASK = torch._nested_tensor_from_mask_left_aligned
#: arguments that batch normalisation writes in training, which torch's schemas do not declare
_RUNNING = frozenset({"running_mean", "running_var"})


class Placeholder(Tensor):
    """A tensor whose data are on another worker or do not matter.

    Args:
        form: a meta or fake tensor of the same shape; views share its storage.
        device: the device that it stands for.
        shapes: what it may be used together with.
    """

    of_another_worker = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, form: Tensor, device: torch.device, factory: PlaceholderFactory) -> Placeholder:
        return Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), storage_offset=form.storage_offset(),
            dtype=form.dtype, layout=form.layout, device=device,
        )  # fmt: skip

    def __init__(self, form: Tensor, device: torch.device, factory: PlaceholderFactory) -> None:
        self.factory = factory
        self._forms: tuple[Tensor | None, FakeTensor | None] = (
            (None, form) if isinstance(form, FakeTensor) else (form, None)
        )

    @property
    def form(self) -> Tensor:
        """A meta or fake tensor of the same shape; all views have forms of one storage."""
        meta, fake = self._forms
        return meta if fake is None else fake  # type: ignore[return-value]

    @property
    def fake(self) -> FakeTensor:
        """The form as a fake tensor, always the same object."""
        meta, fake = self._forms
        if fake is None:
            assert meta is not None
            with _unobserved():
                fake = FakeTensor(self.factory.fake_mode, meta, self.device)
            self._forms = meta, fake
        return fake

    @property
    def meta(self) -> Tensor:
        """The form as a meta tensor, always the same object."""
        meta, fake = self._forms
        if meta is None:
            assert fake is not None
            with _unobserved():
                meta = torch.empty(0, dtype=fake.dtype, device="meta")
                meta.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())
            self._forms = meta, fake
        return meta

    def _exchange(self, value: Placeholder) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._forms = value._forms

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
    if func in OPERATORS:
        made = _on_meta(func, args, kwargs)
        if made is not NotImplemented:
            return made
    wrapped: dict[int, Placeholder] = {}

    def inner(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Placeholder):
            return tensor
        wrapped[id(tensor.fake)] = tensor
        return tensor.fake

    def outer(tensor: Tensor) -> Tensor:
        same = wrapped.get(id(tensor))
        if not isinstance(tensor, FakeTensor):
            return tensor
        if same is None:
            return Placeholder(tensor, tensor.device, next(iter(wrapped.values())).factory)
        if same.shape != tensor.shape or same.stride() != tensor.stride():  # as transpose_() does
            with _unobserved():
                same.data = Placeholder(tensor, tensor.device, same.factory)
        return same

    args, kwargs = _each(args, inner), {name: _each(value, inner) for name, value in kwargs.items()}
    return _each(func(*args, **kwargs), outer)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an operator's argument, or its result, with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_each(child, change) for child in value])
    return value


class _OtherKindError(Exception):
    pass


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of `OPERATORS` on meta tensors; return NotImplemented where these give another result."""
    takes_data = OPERATORS[func]
    known: dict[int, Placeholder] = {}
    others: list[Tensor] = []

    def inner(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placeholder):
            known[id(tensor.meta)] = tensor
            return tensor.meta
        if not takes_data or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise _OtherKindError
        others.append(tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def outer(tensor: Tensor) -> Tensor:
        same = known.get(id(tensor))
        return Placeholder(tensor, like.device, like.factory) if same is None else same

    if kwargs.get("device") is not None or kwargs.get("pin_memory"):
        return NotImplemented
    try:
        args, kwargs = _each(args, inner), {name: _each(value, inner) for name, value in kwargs.items()}
        if not known:
            return NotImplemented
        like = next(iter(known.values()))
        if any(tensor.device != like.device for tensor in (*known.values(), *others)):
            return NotImplemented
        if func is _CONVOLUTION and not all(tensor.is_contiguous() for tensor in args[:2]):
            return NotImplemented  # its memory format depends on the device
        return _each(func(*args, **kwargs), outer)
    except (_OtherKindError, NotImplementedError):
        return NotImplemented


class PlaceholderFactory:
    """Makes placeholders that may be used together."""

    @cached_property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of fake tensors, made on first use, since it imports the compiler."""
        return FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: Tensor, device: torch.device | None = None) -> Placeholder:
        """Return a placeholder of the shape, strides and dtype of `tensor`."""
        device = device or tensor.device
        with _unobserved(), torch.no_grad():
            if device.type == "cpu":
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                return Placeholder(meta, device, self)
            with self.fake_mode:  # which resolves a device without index
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return Placeholder(made, made.device, self)

    def parameter_like(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Return a placeholder for `parameter`, with its attributes."""
        made = self.like(parameter, device)
        if parameter.requires_grad:
            made.requires_grad_()
        made._is_param = True  # what nn.Parameter sets; it would also make another view
        vars(made).update(attributes_of(parameter))
        return made  # type: ignore[return-value]

    def construct(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator without tensor arguments, such as `zeros`; its result is a placeholder."""
        device = kwargs.get("device")
        if func in CONSTRUCTORS and (device is None or device.type == "cpu"):
            return Placeholder(func(*args, **{**kwargs, "device": "meta"}), device or torch.device("cpu"), self)
        with self.fake_mode:
            made = func(*args, **kwargs)
        return Placeholder(made, made.device, self) if isinstance(made, FakeTensor) else made


def _unobserved() -> AbstractContextManager[None]:
    """Return a context in which no dispatch mode sees operators."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def storage_of(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which its views share."""
    try:
        return int((tensor.form if isinstance(tensor, Placeholder) else tensor).untyped_storage()._cdata)
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
    with _unobserved(), torch.no_grad():
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


# Operators whose results' shapes, strides and dtypes on meta tensors are those on a CPU, as a test shows of each. Fake
# tensors support all operators, but take many times as long, and their first one imports the compiler.
_OPERATORS = """
    alias.default detach.default view.default _unsafe_view.default t.default transpose.int permute.default
    unsqueeze.default squeeze.dim squeeze.dims expand.default slice.Tensor select.int split.Tensor
    split_with_sizes.default unbind.int diagonal.default unfold.default add_.Tensor add_.Scalar sub_.Tensor
    mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar silu_.default relu_.default leaky_relu_.default
    hardtanh_.default hardswish_.default masked_fill_.Scalar logical_not.default logical_and.default
    logical_or.default bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor clone.default _to_copy.default
    cat.default stack.default constant_pad_nd.default roll.default flip.default repeat.default sum.default
    sum.dim_IntList mean.default amax.default amin.default var.correction var_mean.correction cumsum.default
    linalg_vector_norm.default argmax.default baddbmm.default embedding.default convolution.default
    max_pool2d_with_indices.default avg_pool2d.default _adaptive_avg_pool2d.default add.Tensor add.Scalar sub.Tensor
    sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default exp.default log.default
    sqrt.default rsqrt.default reciprocal.default sin.default cos.default abs.default sign.default erf.default
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar tanh.default sigmoid.default silu.default gelu.default
    relu.default elu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default
    softplus.default mish.default clamp.default clamp_min.default clamp_max.default maximum.default minimum.default
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar
    ge.Tensor isnan.default where.self masked_fill.Scalar masked_fill.Tensor native_dropout.default bernoulli_.float
    _softmax.default _log_softmax.default _safe_softmax.default nll_loss_forward.default empty_like.default
    ones_like.default zeros_like.default native_layer_norm.default native_group_norm.default
    native_batch_norm.default addmm.default mm.default bmm.default mean.dim upsample_nearest2d.default
    upsample_bilinear2d.default upsample_bicubic2d.default _scaled_dot_product_flash_attention_for_cpu.default
"""
_CONSTRUCTORS = """
    empty.memory_format empty_strided.default zeros.default ones.default full.default arange.default arange.start
    arange.start_step scalar_tensor.default rand.default randn.default eye.default linspace.default
"""


def _named(text: str) -> Iterator[Any]:
    for full_name in text.split():
        name, overload = full_name.split(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and overload in packet.overloads():
            yield getattr(packet, overload)


def _takes_data(operator: Any) -> bool:
    # The aliased arguments of a batch normalisation are its running means, which it does not return.
    is_batch_norm = operator is torch.ops.aten.native_batch_norm.default
    return is_batch_norm or not any(argument.alias_info for argument in operator._schema.arguments)


#: operator -> whether its arguments may be real tensors too: if its results are no views of them
OPERATORS = {operator: _takes_data(operator) for operator in _named(_OPERATORS)}
#: operators without tensor arguments
CONSTRUCTORS = frozenset(_named(_CONSTRUCTORS))
