"""The form of a payload: its skeleton, and the layout of each tensor, without the contents.

Payloads differ in their numbers from microbatch to microbatch, seldom in form: written and read forms are remembered.
The contents of each tensor are one run of memory, with each element once, however often the tensor repeats it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dependency import ConfigError, Malformed
from .payload import SPARSE, Payload, Place, Sparse, extent, fold, folded, is_sparing, unfold
from .values import decode_value, encode_value, malformed

#: number of forms that are remembered, and their largest size
_MOST, _MOST_BYTES = 1000, 2**13
#: tensors up to this size travel inside a message
INLINE_BYTES = 2**15
#: bytes of the gaps of all tensors of a payload that its receiver leaves between their elements
_MOST_GAPS = 2**19
#: a tensor with larger gaps travels with its gaps, if its memory is at most this multiple of its elements
_MOST_REACH = 4
#: most dimensions of a tensor, and the bound of its sizes and strides
_MOST_DIMS, _MOST_ELEMENTS = 64, 2**47
#: most bytes of a copy that keeps the interpreter's lock
_LITTLE = 2**15
_copy_little = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


def copy_memory(to: int, content: int | bytes, size: int) -> None:
    """Copy memory."""
    (_copy_little if size <= _LITTLE else ctypes.memmove)(to, content, size)


class Look(NamedTuple):
    """The layout of a tensor, and of the tensor that travels for it: without gaps or repeats."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: whether it is shown conjugate: matrix products choose their kernel by it
    conjugate: bool
    #: whether all travels that it reaches over, the content of its gaps too
    reaches: bool
    dense_shape: tuple[int, ...]
    dense_strides: tuple[int, ...]
    #: of the tensor that travels
    num_bytes: int
    #: whether it is the tensor itself that travels
    plain: bool
    #: bytes between the elements that the receiver leaves
    gaps: int

    def empty(self) -> Tensor:
        """Return a tensor for the contents that travel."""
        return torch.empty_strided(self.dense_shape, self.dense_strides, dtype=self.dtype, device="cpu")

    def filled(self, content: bytes) -> Tensor:
        """Return the travelling tensor with these contents; their size has been compared."""
        tensor = self.empty()
        copy_memory(tensor.data_ptr(), content, self.num_bytes)
        return tensor

    def refuse(self, tensor: Any) -> None:
        """Raise Malformed if a tensor is not as the one that travels."""
        fits = isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout is torch.strided
        expected = self.dtype, self.dense_shape, self.dense_strides
        if not fits or (tensor.dtype, tensor.shape, tensor.stride()) != expected:
            raise Malformed("malformed message: a tensor beside it is not as its form says")

    def shown(self, dense: Tensor) -> Tensor:
        """Return the tensor that looks so, from the one that has travelled."""
        if self.plain:
            return dense
        view = (self.shape, self.strides)
        tensor = dense.as_strided(*view) if self.reaches else unfold(dense, *view)
        return tensor.conj() if self.conjugate else tensor


class Form(NamedTuple):
    """The form of a payload."""

    skeleton: Any
    looks: tuple[Look, ...]
    #: whether all tensors travel as they are
    plain: bool
    #: of all tensors that travel, and of the tensors inside a message
    num_bytes: int
    inline_bytes: int


_HOST = torch.device("cpu")


def describe(name: str, payload: Payload, device: torch.device = _HOST) -> tuple[bytes, list[Tensor]]:
    """Return the form of the payload of `name`, and the dense tensors with its contents.

    Args:
        device: where the tensors lie.

    Raises:
        ConfigError: something in it cannot travel.
    """
    looks, dense, skeleton, spare = [], [], payload.skeleton, _MOST_GAPS
    try:
        for tensor in payload.tensors:
            look, travels = _seen(tensor, spare, device)
            looks.append(look)
            dense.append(travels)
            spare -= look.gaps
        # Equal values of other types may differ, as 1 and True, so only these are remembered.
        if type(skeleton) is Place or (type(skeleton) is tuple and {*map(type, skeleton)} == {Place}):
            return _written_once(type(skeleton), skeleton, tuple(looks)), dense
        return _written(skeleton, tuple(looks)), dense
    except ConfigError as error:
        raise ConfigError(f"payload of {name}: {error}") from None


def form_of(data: bytes) -> Form:
    """Return the form that `describe` has written.

    Raises:
        Malformed: the bytes are something else, or the parts of the form contradict each other.
    """
    return _remembered(data) if len(data) <= _MOST_BYTES else _form(data)


def _form(data: bytes) -> Form:
    skeleton, seen = _pair(decode_value(data))
    try:
        looks = tuple([_checked_look(*each) for each in seen])
        if sum([look.gaps for look in looks]) > _MOST_GAPS:
            raise Malformed("malformed message: more gaps between elements than a payload may have")
        _refuse_places(skeleton, looks)
    except (TypeError, ValueError, RuntimeError, ConfigError) as error:
        raise malformed(error) from error
    sizes = [look.num_bytes for look in looks]
    inside = sum([size for size in sizes if size <= INLINE_BYTES])
    return Form(skeleton, looks, all([look.plain for look in looks]), sum(sizes), inside)


_remembered = lru_cache(_MOST)(_form)


def _pair(value: Any) -> Any:
    if type(value) is not tuple or len(value) != 2 or type(value[1]) is not tuple:
        raise Malformed("malformed message: no form of a payload")
    return value


def _checked_look(dtype: Any, shape: Any, strides: Any, conjugate: Any, reaches: Any) -> Look:
    """Return the layout of a tensor with these values; check each of them."""
    if type(dtype) is not torch.dtype or type(shape) is not tuple or type(strides) is not tuple:
        raise Malformed("malformed message: the look of a tensor of other types")
    if len(shape) != len(strides) or any(type(each) is not int or each < 0 for each in shape + strides):
        raise Malformed("malformed message: sizes and strides of a tensor that none has")
    if type(conjugate) is not bool or type(reaches) is not bool or conjugate > dtype.is_complex:
        raise Malformed("malformed message: a tensor that cannot be conjugate")
    torch.empty(0, dtype=dtype)  # some types have no tensors
    look = _look(dtype, shape, strides, conjugate, reaches)
    if look is None:
        raise Malformed("malformed message: a tensor of far more memory than elements")
    return look


def _refuse_places(tree: Any, looks: tuple[Look, ...], *, in_sparse: bool = False) -> None:
    """Raise Malformed if a skeleton names a tensor that there is not, or owes a gradient that there cannot be."""
    kind = type(tree)
    if kind is Place:
        if type(tree.number) is not int or not 0 <= tree.number < len(looks):
            raise Malformed(f"malformed message: tensor {tree.number} of {len(looks)}")
        dtype = looks[tree.number].dtype
        if type(tree.owes_grad) is not bool or tree.owes_grad > (dtype.is_floating_point or dtype.is_complex):
            raise Malformed(f"malformed message: a gradient of a tensor of {dtype}")
    elif kind is Sparse:
        if in_sparse or tree.layout not in SPARSE or type(tree.parts) is not tuple or type(tree.owes_grad) is not bool:
            raise Malformed("malformed message: a sparse tensor of another kind")
        hash(tree)  # `unpack` looks for it
        _refuse_places(tree.parts, looks, in_sparse=True)
    elif isinstance(tree, (tuple, list, dict)):
        for child in tree.values() if isinstance(tree, dict) else tree:
            _refuse_places(child, looks, in_sparse=in_sparse)


@dataclass(slots=True)
class Moving(Payload):
    """A payload as dense copies that have been issued, with the layouts on arrival and the event of the arrival."""

    looks: Sequence[Look | None]
    event: Any

    def unfold(self) -> Payload:
        """Return the payload as it was."""
        return Payload([shown(*each) for each in zip(self.tensors, self.looks, strict=True)], self.skeleton)


def shown(dense: Tensor, look: Look | None) -> Tensor:
    """Return the tensor that looks so, from its dense copy; without a look that itself."""
    return dense if look is None else look.shown(dense)


def travels(tensor: Tensor) -> bool:
    """Return whether a tensor has a layout that blocks of memory can hold."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_plain and not tensor.is_quantized and not tensor.is_nested


def assemble(form: Form, contents: list[Tensor]) -> Payload:
    """Return the payload of this form, from its travelled contents."""
    if not form.plain:
        contents = [look.shown(dense) for look, dense in zip(form.looks, contents, strict=True)]
    return Payload(contents, form.skeleton)


def _written(skeleton: Any, looks: tuple[Look, ...]) -> bytes:
    return encode_value((skeleton, tuple([tuple(look[:5]) for look in looks])))


@lru_cache(_MOST)
def _written_once(kind: type, skeleton: Any, looks: tuple[Look, ...]) -> bytes:
    return _written(skeleton, looks)


def _seen(tensor: Tensor, spare: int, device: torch.device) -> tuple[Look, Tensor]:
    """Return the layout of `tensor`, and the tensor to be sent for it, with a limit on bytes of gaps."""
    if not travels(tensor) or not (tensor.is_cpu or tensor.device == device):
        kind = "quantized tensor" if tensor.is_quantized else type(tensor).__qualname__
        layout = "" if type(tensor) is not Tensor or tensor.layout is torch.strided else f" of layout {tensor.layout}"
        advice = ": hand on its `values()` and `offsets()`, or let one stage have both layers" * tensor.is_nested
        raise ConfigError(f"a {kind} on {tensor.device}{layout} cannot travel between workers{advice}")
    return dense_of(tensor, spare)


def dense_of(tensor: Tensor, spare: float = inf) -> tuple[Look, Tensor]:
    """Return the layout of a tensor that travels, and the dense tensor that is sent for it.

    Args:
        spare: most bytes of gaps that its receiver leaves.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    conjugate = tensor.is_conj()
    if conjugate:
        tensor = tensor.conj()  # a view of the memory as it is
    look = _look(tensor.dtype, tensor.shape, tensor.stride(), conjugate, False)
    if look is not None and look.gaps > spare:
        look = _look(tensor.dtype, tensor.shape, tensor.stride(), conjugate, True)
    if look is None:
        tensor = tensor.contiguous()
        look = _look(tensor.dtype, tensor.shape, tensor.stride(), conjugate, False)
        assert look is not None
    if look.reaches:
        return look, tensor.as_strided(look.dense_shape, look.dense_strides)
    return look, tensor if look.plain else fold(tensor)


@lru_cache(_MOST)
def _look(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], conjugate: bool, reaches: bool
) -> Look | None:
    """Return the layout of a tensor with these values; None if it should become dense.

    Raises:
        ConfigError: it has more dimensions or elements than may travel.
    """
    once, there, compact = folded(shape, strides)
    elements, reach = prod(once), 0 if 0 in shape else extent(shape, strides)
    if len(shape) > _MOST_DIMS or max(prod(shape), reach, *shape, *strides, 0) > _MOST_ELEMENTS:
        raise ConfigError(f"a tensor of sizes {shape} and strides {strides} cannot travel between workers")
    plain = (once, compact, False) == (shape, strides, conjugate)
    if not plain and 0 not in shape and not is_sparing(shape, strides):
        return None
    gaps = (reach - elements) * dtype.itemsize if there != compact and elements else 0
    if reaches:
        if not 0 < reach <= _MOST_REACH * elements:
            return None
        once, compact, elements, plain, gaps = (reach,), (1,), reach, False, 0
    num_bytes = elements * dtype.itemsize
    return Look(dtype, tuple(shape), strides, conjugate, reaches, once, compact, num_bytes, plain, gaps)
