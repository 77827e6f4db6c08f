"""The whole model as one file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_whole(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a safetensors file, complete or not at all."""
    folder, name = Path(path).absolute().parent, Path(path).name
    temporary = folder / f".{name}.{os.getpid()}.partial"  # no file of the user's is called so
    try:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
