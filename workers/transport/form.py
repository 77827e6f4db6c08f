"""The form of a payload: its skeleton and what its tensors look like, apart from what is in them.

Payloads differ in their numbers from microbatch to microbatch, seldom in form. So a form is bytes, written and read
once, and remembered by both ends. What is in the tensors is a run of memory for each, with each element once, however
often the tensor repeats it; of a sparse tensor, the runs of those that it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dependency import ConfigError
from .payload import Payload, Place, parts_of
from .strides import fold, folded, is_dense, is_sparing, spread
from .values import Malformed, decode_value, encode_value

#: so many forms are remembered, of up to so many bytes each
_MOST, _LARGEST = 1000, 4096
_written: dict[Any, bytes] = {}
#: of these, what is equal is written alike
_EXACT = {Place, type(None), bool, int, str, bytes, torch.dtype}
_SPARSE = {
    str(layout): layout
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


class Dense(NamedTuple):
    """What a tensor looks like that fills its memory, without gaps or repeats."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: whether it is shown conjugate: matrix products choose their kernel by it
    conjugate: bool
    num_bytes: int

    def empty(self) -> Tensor:
        """Return such a tensor for contents to be put in."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


class Spread(NamedTuple):
    """What a tensor looks like that repeats elements or has gaps between them, and the dense one that travels."""

    dense: Dense
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Sparse(NamedTuple):
    """What a sparse tensor looks like, and those that it is made of."""

    layout: str
    shape: tuple[int, ...]
    coalesced: bool
    parts: tuple[Dense | Spread, ...]


class Form(NamedTuple):
    """A form as it has been read."""

    skeleton: Any
    looks: tuple[Dense | Spread | Sparse, ...]
    #: of the tensors that travel, in order
    dense: tuple[Dense, ...]
    #: whether these are the payload's
    plain: bool
    #: of what travels
    num_bytes: int


def describe(name: str, payload: Payload) -> tuple[bytes, list[Tensor]]:
    """Return the form of the payload of `name` and the tensors, all dense, whose contents go with it.

    Raises:
        ConfigError: something in it cannot travel.
    """
    key = _key_of_one(payload)
    if key is not None and (known := _written.get(key)) is not None:
        return known, payload.tensors
    dense: list[Tensor] = []
    try:
        looks = tuple([_look(tensor, dense) for tensor in payload.tensors])
        if key is None or dense[0] is not payload.tensors[0] or dense[0].is_complex():
            identity = _identity(payload.skeleton)
            key = None if identity is None else (identity, looks)
        form = None if key is None else _written.get(key)
        if form is None:
            form = _write(payload.skeleton, looks)
            if key is not None and len(form) <= _LARGEST:
                if len(_written) >= _MOST:
                    _written.clear()
                _written[key] = form
    except ConfigError as error:
        raise ConfigError(f"the payload of {name}: {error}") from None
    return form, dense


def _key_of_one(payload: Payload) -> Any:
    """Return what tells the form of a payload that is a dense tensor of real numbers, or a tuple of one, as most are.

    None: it is something else. What is not dense or not real has no form by this key.
    """
    if len(payload.tensors) != 1:
        return None
    (tensor,), skeleton = payload.tensors, payload.skeleton
    bare = type(skeleton) is Place
    if not bare and not (type(skeleton) is tuple and len(skeleton) == 1 and type(skeleton[0]) is Place):
        return None
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_neg():
        return None
    return bare, skeleton, tensor.dtype, tensor.shape, tensor.stride()


def form_of(data: bytes) -> Form:
    """Return the form that `describe` has written.

    Raises:
        Malformed: it has not.
    """
    return (_remembered if len(data) <= _LARGEST else _read)(data)


def assemble(form: Form, contents: list[Tensor]) -> Payload:
    """Return the payload of this form, from tensors that look as `form.dense` says."""
    if form.plain:
        return Payload(contents, form.skeleton)
    rest = iter(contents)
    return Payload([_assembled(look, rest) for look in form.looks], form.skeleton)


def _look(tensor: Tensor, dense: list[Tensor]) -> tuple[Any, ...]:
    """Return a tree that says what `tensor` looks like; append what is to be sent of it to `dense`."""
    if type(tensor) is not Tensor or not tensor.is_cpu:
        raise ConfigError(
            f"a {type(tensor).__qualname__} on {tensor.device} cannot travel between workers{_advice(tensor)}"
        )
    if tensor.layout is not torch.strided:
        return _sparse_look(tensor, dense)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    conjugate = tensor.is_conj()
    if conjugate:
        tensor = tensor.conj()  # a view of the memory as it is
    if not is_dense(tensor) and not is_sparing(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    dense.append(tensor if is_dense(tensor) else fold(tensor))
    return tensor.dtype, tensor.shape, tensor.stride(), conjugate


def _advice(tensor: Tensor) -> str:
    if not tensor.is_nested:
        return ""
    return ": hand on its `values()` and `offsets()` and make it anew, or let one stage have both layers (`split=`)"


def _sparse_look(tensor: Tensor, dense: list[Tensor]) -> tuple[Any, ...]:
    layout = str(tensor.layout)
    if layout not in _SPARSE:
        raise ConfigError(f"a tensor of layout {layout} cannot travel between workers")
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    return layout, tensor.shape, coalesced, tuple([_look(part, dense) for part in parts_of(tensor)])


def _write(skeleton: Any, looks: tuple[Any, ...]) -> bytes:
    if any(str(look[0]).startswith("torch.q") for look in looks):
        raise ConfigError("a quantized tensor cannot travel between workers")
    return encode_value((skeleton, looks))


def _identity(value: Any) -> Any:
    """Return what is equal only for what is written alike, as 1, 1.0 and True are not; None: unknown."""
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if kind is dict:
        value = [part for item in value.items() for part in item]
    elif kind is not tuple and kind is not list:
        return None
    parts = [_identity(part) for part in value]
    return None if None in parts else (kind, *parts)


def _read(data: bytes) -> Form:
    described = decode_value(data)
    if type(described) is not tuple or len(described) != 2 or type(described[1]) is not tuple:
        raise Malformed("malformed form: not of a payload")
    skeleton, looks = described
    missing = [place.number for place in _places(skeleton) if place.number >= len(looks)]
    if missing:
        raise Malformed(f"malformed form: tensor {missing[0]} of {len(looks)} tensors")
    read = tuple([_read_look(look) for look in looks])
    dense = tuple([each for look in read for each in _dense_in(look)])
    return Form(
        skeleton,
        read,
        dense,
        all([type(look) is Dense and not look.conjugate for look in read]),
        sum([each.num_bytes for each in dense]),
    )


def _dense_in(look: Dense | Spread | Sparse) -> Iterator[Dense]:
    if isinstance(look, Dense):
        yield look
    for part in look.parts if isinstance(look, Sparse) else [look.dense] if isinstance(look, Spread) else []:
        yield from _dense_in(part)


def _places(skeleton: Any) -> Iterator[Place]:
    if type(skeleton) is Place:
        yield skeleton
    elif isinstance(skeleton, (tuple, list)):
        for child in skeleton:
            yield from _places(child)
    elif isinstance(skeleton, dict):
        yield from _places([*skeleton, *skeleton.values()])


_remembered = lru_cache(_MOST)(_read)


def _read_look(look: Any) -> Dense | Spread | Sparse:
    try:
        first, shape, third, last = look
        if isinstance(first, torch.dtype):
            return _read_strided(first, tuple(shape), tuple(third), last)
        parts = tuple([_read_strided(*part) for part in last])
    except (ValueError, TypeError) as error:
        raise Malformed(f"malformed form: not a tensor's: {error}") from error
    if first not in _SPARSE or type(third) is not bool or len(parts) != (2 if first == "torch.sparse_coo" else 3):
        raise Malformed(f"malformed form: a tensor of layout {first!r}")
    return Sparse(first, tuple(shape), third, parts)


def _read_strided(dtype: Any, shape: tuple[Any, ...], strides: tuple[Any, ...], conjugate: Any) -> Dense | Spread:
    sizes = (*shape, *strides)
    if not (isinstance(dtype, torch.dtype) and type(conjugate) is bool and len(shape) == len(strides) <= 64):
        raise Malformed("malformed form: a tensor without type, shape or strides")
    if not all([type(size) is int and 0 <= size < 2**62 for size in sizes]) or prod(shape) >= 2**62:
        raise Malformed(f"malformed form: a tensor of shape {shape} and strides {strides}")
    if (0 not in shape and not is_sparing(shape, strides)) or (conjugate and not dtype.is_complex):
        raise Malformed(f"malformed form: a {dtype} of shape {shape} and strides {strides}")
    once, _, compact = folded(shape, strides)
    dense = Dense(dtype, once, compact, conjugate, prod(once) * dtype.itemsize)
    return dense if (once, compact) == (shape, strides) else Spread(dense, shape, strides)


def _assembled(look: Dense | Spread | Sparse, contents: Iterator[Tensor]) -> Tensor:
    if isinstance(look, Dense):
        tensor = next(contents)
        return tensor.conj() if look.conjugate else tensor
    if isinstance(look, Spread):
        tensor = spread(next(contents), look.shape, look.strides)
        return tensor.conj() if look.dense.conjugate else tensor
    parts = [_assembled(part, contents) for part in look.parts]
    more: Any = {"size": look.shape, "device": "cpu", "check_invariants": True}
    try:
        if look.layout == "torch.sparse_coo":
            return torch.sparse_coo_tensor(parts[0], parts[1], is_coalesced=look.coalesced, **more)
        return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], layout=_SPARSE[look.layout], **more)
    except (RuntimeError, TypeError) as error:
        raise Malformed(f"malformed tensor: {error}") from error
