"""Files of tensors in the format safetensors, written from the tensors' own memory, and sums that tell damage.

The library's own writer maps each tensor through ctypes, which keeps a type for ever for each size that it has met:
a job that writes checkpoints for hours would grow.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save
from torch import Tensor

from ..workers.compute.digest import memory_of

#: bytes of the number that says how long the header is; and of what that length is a multiple
_LENGTH_BYTES = 8


def write(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write contiguous tensors of the CPU to a file, wait until they are on the disk, and return its size.

    Raises:
        OSError: it cannot be written.
        KeyError: safetensors has no name for a type.
    """
    with open(path, "wb") as file:
        return write_to(file, tensors)


def write_to(file: BinaryIO, tensors: Mapping[str, Tensor], about: Mapping[str, str] = {}) -> int:
    """Write to an open file as `write` does, with texts `about` the tensors in its header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    # Types that take more bytes come first, so that each tensor begins at a multiple of what its type takes.
    names, end = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)), 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _called(tensor.dtype), "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for name in names:
        file.write(memory_of(tensors[name]))
    file.flush()
    os.fsync(file.fileno())
    return _LENGTH_BYTES + len(text) + end


def checksum(tensor: Tensor) -> int:
    """Return a number that tells a contiguous tensor of the CPU from one of which a bit has changed."""
    return zlib.crc32(memory_of(tensor), zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


@lru_cache
def _called(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type."""
    written = save({"": torch.empty(1, dtype=dtype)})
    length = int.from_bytes(written[:_LENGTH_BYTES], "little")
    return str(json.loads(written[_LENGTH_BYTES : _LENGTH_BYTES + length])[""]["dtype"])
