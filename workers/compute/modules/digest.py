"""A few bytes that distinguish batches or weights, at a negligible cost. No device is waited for.

Small tensors count in full, and large ones by a sample, which touches every row while there are no more than 256:
workers that drew, shuffled or sampled for themselves differ almost everywhere.
"""

import ctypes
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from ...transport.call import PARTS
from ...transport.payload import Tree, named_leaves, tensors_of
from .torch_internals import local

_READ = 0x100
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
#: most bytes of a tensor that counts in full
_FULL_BYTES = 2**11
#: elements that stand for a larger one
_SAMPLES = 256
#: numbers of such a sample
_NUM_COMPARED = 1024
#: number of tensors of a batch with values that count; with more tensors, each call takes different ones
MOST_TENSORS = 8


def describe(tree: Tree, call: int = 0) -> str:
    """Return the form of the tensors of `tree` and digests of their values, an empty string if there is none.

    The digests are missing where a tensor is on a device, which would have to be waited for.

    Args:
        call: a number that all workers know; it selects the tensors if there are many.
    """
    tensors = list(tensors_of(tree))
    if not tensors:
        return ""
    form, shapes = shapes_of(tensors)
    every = -(-len(tensors) // MOST_TENSORS)
    chosen = tensors[call % every :: every]
    if not all(map(_is_here, chosen)):
        return PARTS.join((form, f"{shapes:x}"))
    names = {id(each): name for name, each in named_leaves(tree)}
    return PARTS.join((form, f"{shapes:x}", *[f"{names.get(id(each), '')}={_digest(each, 0):x}" for each in chosen]))


def shapes_of(tensors: Sequence[Tensor]) -> tuple[str, int]:
    """Return how to call a batch of these tensors, and a digest of their shapes."""
    shapes = array("q", chain.from_iterable([(tensor.itemsize, *tensor.shape, -1) for tensor in tensors]))
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{str(tensors[0].dtype).removeprefix('torch.')}{list(tensors[0].shape)}{more}", zlib.crc32(shapes)


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a number that differs, almost surely, where values drawn at random do. On a device they count as 0."""
    value = 0
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            value = zlib.crc32(digest(_parts(tensor)).to_bytes(4, "little"), value)
        elif _is_here(tensor):
            value = _digest(tensor, value)
    return value


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host, not copied; the tensor must outlive it.

    Not by array types of ctypes: each size would leave one type in memory for ever.
    """
    view: memoryview = _memory_view(tensor.data_ptr(), tensor.nbytes, _READ) if tensor.nbytes else memoryview(b"")
    return view


def sample(tensor: Tensor) -> Tensor:
    """Return numbers sampled from all over a tensor, to compare it with an earlier state. On its device."""
    tensor = local(tensor).detach()
    if hasattr(tensor, "__tensor_flatten__"):  # quantized: it has few operations
        return torch.cat([sample(part).double() for part in _parts(tensor)])
    flat = tensor.flatten()
    return flat[:: 1 + len(flat) // _NUM_COMPARED]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor of a wrapping class consists of."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]


def _is_here(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided


def _digest(tensor: Tensor, before: int) -> int:
    if tensor.nbytes > _FULL_BYTES:
        try:
            tensor = tensor.detach().take(_places(tensor.numel()))
        except NotImplementedError:  # some small types cannot be indexed
            tensor = tensor.flatten()[:_SAMPLES]
    tensor = tensor.contiguous()
    return zlib.crc32(ctypes.string_at(tensor.data_ptr(), tensor.nbytes), before)


@lru_cache
def _places(count: int) -> Tensor:
    """Return one place in each of 256 equal parts of `count` elements, not always in the same column of a row."""
    part, index = count // _SAMPLES, torch.arange(_SAMPLES)
    return index * part + index * 2654435761 % part
