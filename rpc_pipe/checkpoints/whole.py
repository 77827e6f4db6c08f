"""The whole model: put together from the workers' tensors, and as one file."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..dependency import ConfigError
from ..workers.actor import WorkerActor

#: what folders end with in which a file is written
_PARTIAL = ".partial"


def own_tensors(actor: WorkerActor) -> dict[str, Tensor]:
    """Return the tensors of a worker's shards, each by its name in the unsplit model; those of first replicas."""
    first_route = [shard for (_, route), shard in actor.shards.items() if route == 0]
    return {name: t for shard in first_route for name, t in shard.evaluated_state_dict().items()}


def merged(parts: Iterable[Mapping[str, Tensor]], place_of: Callable[[str], Any]) -> dict[str, Tensor]:
    """Return copies of the tensors of all workers on the CPU, sorted by `place_of`.

    Copies: of workers in this process these are the parameters themselves, and tied ones share storage, which
    safetensors refuses.
    """
    found = {name: tensor.cpu().clone() for part in parts for name, tensor in part.items()}
    return {name: found[name] for name in sorted(found, key=place_of)}


def save_whole(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a safetensors file, complete or not at all.

    Raises:
        ConfigError: it cannot be written, or what has that name is no regular file, but a device, say, whose place
            another file would take.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError(f"{path}: is not a regular file")
    folder, name = Path(path).absolute().parent, Path(path).name
    for left in folder.glob(f".{glob.escape(name)}.*{_PARTIAL}"):
        if not Path("/proc", left.name.removesuffix(_PARTIAL).rpartition(".")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)  # of a process that was killed while it wrote
    # A folder, as the library writes to a file of its own beside the one that is named. No user has one of this name.
    temporary = folder / f".{name}.{os.getpid()}{_PARTIAL}"
    try:
        temporary.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary / name)
        (temporary / name).replace(path)
    except (OSError, SafetensorError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be written: {said}; what was there is as it was") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
