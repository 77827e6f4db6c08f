"""The form of a payload: its skeleton, and what each tensor looks like, not what is in it.

Payloads differ in their numbers from microbatch to microbatch, seldom in form: what has been written and read is
remembered. What is in the tensors is a run of memory for each, with each element once, however often the tensor repeats
it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dependency import ConfigError
from .payload import Payload, Place
from .strides import fold, folded, is_sparing, spread
from .values import decode_value, encode_value

#: so many forms are remembered
_MOST = 1000
#: a copy of up to so many bytes is not worth letting other threads in between
_LITTLE = 2**15
_copy_little = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


def copy_memory(to: int, content: int | bytes, size: int) -> None:
    """Copy memory."""
    (_copy_little if size <= _LITTLE else ctypes.memmove)(to, content, size)


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
    #: whether it is the tensor itself that travels
    plain: bool

    def empty(self) -> Tensor:
        """Return what travels, for contents to be put in."""
        return torch.empty_strided(self.dense_shape, self.dense_strides, dtype=self.dtype, device="cpu")

    def filled(self, content: bytes) -> Tensor:
        """Return what travels, with these contents."""
        tensor = self.empty()
        copy_memory(tensor.data_ptr(), content, self.num_bytes)
        return tensor

    def shown(self, dense: Tensor) -> Tensor:
        """Return the tensor that looks so, from what has travelled."""
        if self.plain:
            return dense
        tensor = spread(dense, self.shape, self.strides)
        return tensor.conj() if self.conjugate else tensor


class Form(NamedTuple):
    """What a payload looks like."""

    skeleton: Any
    looks: tuple[Look, ...]
    #: whether all tensors travel as they are
    plain: bool
    #: of what travels
    num_bytes: int


def describe(name: str, payload: Payload) -> tuple[bytes, list[Tensor]]:
    """Return the form of the payload of `name` and the tensors, all dense, whose contents go with it.

    Raises:
        ConfigError: something in it cannot travel.
    """
    looks, dense, skeleton = [], [], payload.skeleton
    try:
        for tensor in payload.tensors:
            look, travels = _seen(tensor)
            looks.append(look)
            dense.append(travels)
        # Others that are equal are not the same, as 1 and True, so only these are remembered.
        if type(skeleton) is Place or (type(skeleton) is tuple and {*map(type, skeleton)} == {Place}):
            return _written_once(type(skeleton), skeleton, tuple(looks)), dense
        return _written(skeleton, tuple(looks)), dense
    except ConfigError as error:
        raise ConfigError(f"the payload of {name}: {error}") from None


@lru_cache(_MOST)
def form_of(data: bytes) -> Form:
    """Return the form that `describe` has written."""
    return Form(*decode_value(data))


def assemble(form: Form, contents: list[Tensor]) -> Payload:
    """Return the payload of this form, from what has travelled."""
    if not form.plain:
        contents = [look.shown(dense) for look, dense in zip(form.looks, contents, strict=True)]
    return Payload(contents, form.skeleton)


def _written(skeleton: Any, looks: tuple[Look, ...]) -> bytes:
    plain, num_bytes = all([look.plain for look in looks]), sum([look.num_bytes for look in looks])
    return encode_value((skeleton, looks, plain, num_bytes))


@lru_cache(_MOST)
def _written_once(kind: type, skeleton: Any, looks: tuple[Look, ...]) -> bytes:
    return _written(skeleton, looks)


def _seen(tensor: Tensor) -> tuple[Look, Tensor]:
    """Return what `tensor` looks like, and what is to be sent for it."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized tensor" if tensor.is_quantized else type(tensor).__qualname__
        layout = "" if type(tensor) is not Tensor or tensor.layout is torch.strided else f" of layout {tensor.layout}"
        raise ConfigError(f"a {kind} on {tensor.device}{layout} cannot travel between workers{_advice(tensor)}")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    conjugate = tensor.is_conj()
    if conjugate:
        tensor = tensor.conj()  # a view of the memory as it is
    look = _look(tensor.dtype, tensor.shape, tensor.stride(), conjugate)
    if look is None:
        tensor = tensor.contiguous()
        look = _look(tensor.dtype, tensor.shape, tensor.stride(), conjugate)
        assert look is not None
    return look, tensor if look.plain else fold(tensor)


@lru_cache(_MOST)
def _look(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], conjugate: bool) -> Look | None:
    """Return what a tensor with these looks like, None if it had better be dense."""
    once, _, compact = folded(shape, strides)
    plain = (once, compact, False) == (shape, strides, conjugate)
    if not plain and 0 not in shape and not is_sparing(shape, strides):
        return None
    return Look(dtype, tuple(shape), strides, conjugate, once, compact, prod(once) * dtype.itemsize, plain)


def _advice(tensor: Tensor) -> str:
    if not tensor.is_nested:
        return ""
    return ": hand on its `values()` and `offsets()` and make it anew, or let one stage have both layers (`split=`)"
