"""Operators whose results are a function of shapes alone, which meta tensors know: shapes, types, strides.

Fake tensors find out for every operator how it is to be treated, which takes many times longer; so do kernels for meta
tensors that are written in Python. A test compares all with what real tensors give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides

#: of meta tensors; returns NotImplemented where the kernel is to be asked
Formula = Callable[..., Any]


class Treatment(NamedTuple):
    """How an operator is run."""

    #: whether it may take tensors that have numbers: its results are not views of those
    takes_numbers: bool
    formula: Formula | None


# --- forms that are quicker to say than to ask the kernel, where that is written in Python


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(*shapes: torch.Size) -> Sequence[int] | None:
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    length = max(map(len, shapes))
    columns = list(zip(*((1,) * (length - len(shape)) + tuple(shape) for shape in shapes), strict=True))
    sizes = [next((size for size in column if size != 1), 1) for column in columns]
    fits = all(size in (1, whole) for column, whole in zip(columns, sizes, strict=True) for size in column)
    return sizes if fits else None


def _each_element(dtype: torch.dtype | None, *args: Any, **options: Any) -> Any:
    """Return what an operator makes of its first one or two arguments, in the type to which they are promoted."""
    given = [arg for arg in args if isinstance(arg, Tensor)]
    first = given[0]
    if dtype is None:
        dtype = torch.result_type(*args[:2]) if len(args) > 1 and isinstance(args[1], _NUMBER) else first.dtype
        if not dtype.is_floating_point:
            return NotImplemented
    if all(tensor.shape == first.shape and tensor.stride() == first.stride() for tensor in given):
        return torch.empty_like(first, dtype=dtype)
    shape = _broadcast(*(tensor.shape for tensor in given))
    if shape is None:
        return NotImplemented
    if all(tensor.is_contiguous() for tensor in given):
        return _empty(shape, dtype)
    strides = compute_elementwise_output_strides(*(tensor.expand(shape) for tensor in given))
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


_NUMBER = (Tensor, int, float)


def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    plain = x.is_contiguous() and train and x.is_floating_point()
    return (_empty(x.shape, x.dtype), _empty(x.shape, torch.bool)) if plain else NotImplemented


def _layer_norm(x: Tensor, shape: Sequence[int], *rest: Any) -> Any:
    if not x.is_contiguous() or x.dtype != torch.float32:
        return NotImplemented
    statistics = [_empty([*x.shape[: -len(shape)], *(1 for _ in shape)], x.dtype) for _ in range(2)]
    return _empty(x.shape, x.dtype), *statistics


def _group_norm(x: Tensor, weight: Any, bias: Any, rows: int, channels: int, size: int, groups: int, eps: float) -> Any:
    if not x.is_contiguous() or x.dtype != torch.float32:
        return NotImplemented
    return _empty(x.shape, x.dtype), _empty([rows, groups], x.dtype), _empty([rows, groups], x.dtype)


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any) -> Any:
    fits = all(t is None or t.shape == x.shape[1:2] for t in (weight, bias, mean, variance))
    if not fits or not x.is_contiguous() or x.dtype != torch.float32:
        return NotImplemented
    count = x.shape[1] if training else 0
    return _empty(x.shape, x.dtype), _empty([count], x.dtype), _empty([count], x.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> Any:
    fits = a.shape[1] == b.shape[0] and bias.shape == b.shape[1:] and bias.dtype == a.dtype == b.dtype
    return _empty([a.shape[0], b.shape[1]], a.dtype) if fits else NotImplemented


def _mm(a: Tensor, b: Tensor) -> Any:
    fits = a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2] and a.dtype == b.dtype
    return _empty([*a.shape[:-1], b.shape[-1]], a.dtype) if fits else NotImplemented


def _mean(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not dims or not x.is_contiguous() or dtype is not None or not x.is_floating_point():
        return NotImplemented
    gone = {dim % x.dim() for dim in dims}
    return _empty([1 if dim in gone else n for dim, n in enumerate(x.shape) if keepdim or dim not in gone], x.dtype)


def _upsample(x: Tensor, size: Sequence[int] | None, *rest: Any) -> Any:
    return _empty([*x.shape[:2], *size], x.dtype) if size and x.is_contiguous() else NotImplemented


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
    if not q.shape[::3] == k.shape[::3] == v.shape[::3] or q.dtype != torch.float32:
        return NotImplemented
    rows, heads, length, _ = q.shape
    return torch.empty_like(q), _empty([rows, length, heads], q.dtype).transpose(1, 2)


def _softmax(x: Tensor, dim: int, to_float: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if to_float or dtype is not None or not x.is_contiguous() else torch.empty_like(x)


def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Any:
    fits = reduction and x.dim() == 2 and target.shape == x.shape[:1] and weight is None
    return (_empty([], x.dtype), _empty([], x.dtype)) if fits else NotImplemented


def _same(x: Tensor, *args: Any, **options: Any) -> Any:
    return x


def _like(x: Tensor, **options: Any) -> Any:
    plain = x.is_contiguous() and all(value is None for value in options.values())
    return _empty(x.shape, x.dtype) if plain else NotImplemented


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Any:
    return _each_element(torch.result_type(a, b), condition, a, b)


def _masked(x: Tensor, mask: Tensor, value: Any) -> Any:
    return _each_element(x.dtype, x, mask)


_KERNELS = """
    alias.default detach.default view.default _unsafe_view.default t.default transpose.int permute.default
    unsqueeze.default squeeze.dim squeeze.dims expand.default slice.Tensor select.int split.Tensor
    split_with_sizes.default unbind.int diagonal.default unfold.default
    add_.Tensor add_.Scalar sub_.Tensor mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar silu_.default relu_.default
    leaky_relu_.default hardtanh_.default hardswish_.default masked_fill_.Scalar
    logical_not.default logical_and.default logical_or.default bitwise_not.default bitwise_and.Tensor
    bitwise_or.Tensor clone.default _to_copy.default cat.default stack.default constant_pad_nd.default roll.default
    flip.default repeat.default sum.default sum.dim_IntList mean.default amax.default amin.default var.correction
    var_mean.correction cumsum.default linalg_vector_norm.default argmax.default
    baddbmm.default embedding.default convolution.default max_pool2d_with_indices.default avg_pool2d.default
    _adaptive_avg_pool2d.default
"""
_FORMULAS: dict[str, Formula] = {
    """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar
    neg.default exp.default log.default sqrt.default rsqrt.default reciprocal.default sin.default cos.default
    abs.default sign.default erf.default pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar tanh.default sigmoid.default
    silu.default gelu.default relu.default elu.default leaky_relu.default hardtanh.default hardswish.default
    hardsigmoid.default softplus.default mish.default clamp.default clamp_min.default clamp_max.default
    maximum.default minimum.default
    """: partial(_each_element, None),
    """
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar
    ge.Tensor isnan.default
    """: partial(_each_element, torch.bool),
    "where.self": _where,
    "masked_fill.Scalar masked_fill.Tensor": _masked,
    "native_dropout.default": _dropout,
    "bernoulli_.float": _same,
    "_softmax.default _log_softmax.default _safe_softmax.default": _softmax,
    "nll_loss_forward.default": _nll_loss,
    "empty_like.default ones_like.default zeros_like.default": _like,
    "native_layer_norm.default": _layer_norm,
    "native_group_norm.default": _group_norm,
    "native_batch_norm.default": _batch_norm,
    "addmm.default": _addmm,
    "mm.default bmm.default": _mm,
    "mean.dim": _mean,
    "upsample_nearest2d.default upsample_bilinear2d.default upsample_bicubic2d.default": _upsample,
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
}


_CONSTRUCTORS = """
    empty.memory_format empty_strided.default zeros.default ones.default full.default arange.default arange.start
    arange.start_step scalar_tensor.default rand.default randn.default eye.default linspace.default
"""


def _named(text: str) -> Iterator[Any]:
    for said in text.split():
        name, overload = said.split(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and overload in packet.overloads():
            yield getattr(packet, overload)


def _operators() -> dict[Any, Treatment]:
    found = {}
    for names, formula in ((_KERNELS, None), *_FORMULAS.items()):
        for operator in _named(names):
            writes_or_views = any(argument.alias_info for argument in operator._schema.arguments)
            # Of its running means nothing is returned.
            is_batch_norm = operator is torch.ops.aten.native_batch_norm.default
            found[operator] = Treatment(not writes_or_views or is_batch_norm, formula)
    return found


OPERATORS = _operators()
#: what makes tensors from nothing
CONSTRUCTORS = frozenset(_named(_CONSTRUCTORS))
