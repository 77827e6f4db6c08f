"""Files of tensors in the format safetensors that are on the disk, and sums that tell damage."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..workers.compute.digest import memory_of
from .folder import sync, umask


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] = {}) -> int:
    """Write contiguous tensors of the CPU to a file, wait until they are on the disk, and return its size.

    Args:
        about: texts for its header.

    Raises:
        OSError: it cannot be written, or safetensors has no name for a type.
    """
    try:
        save_file(dict(tensors), path, {"format": "pt", **about})
    except KeyError as error:
        raise OSError(f"safetensors has no {error}") from error
    except SafetensorError as error:  # which has the number in its text alone
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error
    path.chmod(0o666 & ~umask())
    sync(path)
    return path.stat().st_size


def checksum(tensor: Tensor) -> int:
    """Return a number that tells a contiguous tensor of the CPU from one of which a bit has changed."""
    return zlib.crc32(memory_of(tensor), zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))
