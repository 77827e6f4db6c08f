"""The form of a payload: its skeleton in a line, and in a line for each tensor what that looks like, not what is in it.

Payloads differ in their numbers from microbatch to microbatch, seldom in form: what has been written and read is
remembered. What is in the tensors is a run of memory for each, with each element once, however often the tensor repeats
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dependency import ConfigError
from .payload import Payload, Place
from .strides import fold, folded, is_dense, is_sparing, spread
from .values import DTYPES, Malformed, decode_value, encode_value

#: so many forms are remembered, of up to so many bytes each
_MOST, _LARGEST = 1000, 4096


class Look(NamedTuple):
    """What a tensor looks like, and the one that travels for it: without gaps or repeats."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: whether it is shown conjugate: matrix products choose their kernel by it
    conjugate: bool
    dense_shape: tuple[int, ...]
    dense_strides: tuple[int, ...]
    #: of what travels
    num_bytes: int

    def empty(self) -> Tensor:
        """Return what travels, for contents to be put in."""
        return torch.empty_strided(self.dense_shape, self.dense_strides, dtype=self.dtype, device="cpu")

    def shown(self, dense: Tensor) -> Tensor:
        """Return the tensor that looks so, from what has travelled."""
        if (self.dense_shape, self.dense_strides) != (self.shape, self.strides):
            dense = spread(dense, self.shape, self.strides)
        return dense.conj() if self.conjugate else dense


class Form(NamedTuple):
    """A form as it has been read."""

    skeleton: Any
    looks: tuple[Look, ...]
    #: whether the tensors that travel are the payload's
    plain: bool
    #: of what travels
    num_bytes: int


def describe(name: str, payload: Payload) -> tuple[bytes, list[Tensor]]:
    """Return the form of the payload of `name` and the tensors, all dense, whose contents go with it.

    Raises:
        ConfigError: something in it cannot travel.
    """
    if (form := _form_of_one(payload)) is not None:
        return form, payload.tensors
    dense: list[Tensor] = []
    try:
        looks = [_look(tensor, dense) for tensor in payload.tensors]
        return b"\n".join([encode_value(payload.skeleton), *looks]), dense
    except ConfigError as error:
        raise ConfigError(f"the payload of {name}: {error}") from None


def _form_of_one(payload: Payload) -> bytes | None:
    """Return the form of a payload that is a dense tensor of real numbers, or a tuple of one, as most are; or None."""
    if len(payload.tensors) != 1:
        return None
    (tensor,), skeleton = payload.tensors, payload.skeleton
    bare = type(skeleton) is Place
    if not bare and not (type(skeleton) is tuple and len(skeleton) == 1 and type(skeleton[0]) is Place):
        return None
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_neg():
        return None
    return _dense_form(bare, skeleton, tensor.dtype, tensor.shape, tensor.stride())


@lru_cache(_MOST)
def _dense_form(
    bare: bool, skeleton: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> bytes | None:
    if dtype.is_complex or str(dtype).startswith("torch.q") or folded(shape, strides) != (shape, strides, strides):
        return None
    return encode_value(skeleton) + b"\n" + _line(dtype, shape, strides, False)


@lru_cache(_MOST)
def _line(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], conjugate: bool) -> bytes:
    """Write what a tensor looks like."""
    return encode_value([str(dtype), [*shape], [*strides], conjugate])


def form_of(data: bytes) -> Form:
    """Return the form that `describe` has written.

    Raises:
        Malformed: it has not.
    """
    return (_remembered if len(data) <= _LARGEST else _read)(data)


def assemble(form: Form, contents: list[Tensor]) -> Payload:
    """Return the payload of this form, from what has travelled."""
    if not form.plain:
        contents = [look.shown(dense) for look, dense in zip(form.looks, contents, strict=True)]
    return Payload(contents, form.skeleton)


def _look(tensor: Tensor, dense: list[Tensor]) -> bytes:
    """Return what `tensor` looks like; append what is to be sent for it to `dense`."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized tensor" if tensor.is_quantized else type(tensor).__qualname__
        layout = "" if type(tensor) is not Tensor or tensor.layout is torch.strided else f" of layout {tensor.layout}"
        raise ConfigError(f"a {kind} on {tensor.device}{layout} cannot travel between workers{_advice(tensor)}")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    conjugate = tensor.is_conj()
    if conjugate:
        tensor = tensor.conj()  # a view of the memory as it is
    if not is_dense(tensor) and not is_sparing(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    dense.append(fold(tensor))
    return _line(tensor.dtype, tensor.shape, tensor.stride(), conjugate)


def _advice(tensor: Tensor) -> str:
    if not tensor.is_nested:
        return ""
    return ": hand on its `values()` and `offsets()` and make it anew, or let one stage have both layers (`split=`)"


def _read(data: bytes) -> Form:
    skeleton, *looks = map(decode_value, data.split(b"\n"))
    try:
        read = tuple([_read_look(*look) for look in looks])
    except TypeError as error:
        raise Malformed(f"malformed form: not of a payload: {error}") from error
    for number, _ in _places(skeleton):
        if type(number) is not int or not 0 <= number < len(read):
            raise Malformed(f"malformed form: tensor {number} of {len(read)} tensors")
    plain = all([look[1:4] == (look.dense_shape, look.dense_strides, False) for look in read])
    return Form(skeleton, read, plain, sum([look.num_bytes for look in read]))


_remembered = lru_cache(_MOST)(_read)


def _places(skeleton: Any) -> Iterator[Place]:
    if type(skeleton) is Place:
        yield skeleton
    elif isinstance(skeleton, (tuple, list)):
        for child in skeleton:
            yield from _places(child)
    elif isinstance(skeleton, dict):
        yield from _places([*skeleton, *skeleton.values()])


def _read_look(name: str, shape: Any, strides: Any, conjugate: bool) -> Look:
    dtype, shape, strides = DTYPES.get(name), tuple(shape), tuple(strides)
    sizes = (*shape, *strides)
    if dtype is None or type(conjugate) is not bool or not len(shape) == len(strides) <= 64:
        raise Malformed("malformed form: a tensor without type, shape or strides")
    if not all([type(size) is int and 0 <= size < 2**62 for size in sizes]) or prod(shape) >= 2**62:
        raise Malformed(f"malformed form: a tensor of shape {shape} and strides {strides}")
    if (0 not in shape and not is_sparing(shape, strides)) or (conjugate and not dtype.is_complex):
        raise Malformed(f"malformed form: a {dtype} of shape {shape} and strides {strides}")
    once, _, compact = folded(shape, strides)
    return Look(dtype, shape, strides, conjugate, once, compact, prod(once) * dtype.itemsize)
