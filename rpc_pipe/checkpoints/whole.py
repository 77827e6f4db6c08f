"""The whole model: put together from the workers' tensors, and as one file."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ..dependency import ConfigError, StorageError
from ..system.files import replacing
from ..workers.actor import WorkerActor
from .collective import is_first_member, together
from .json_values import write

#: where torch keeps the versions of modules beside a state
_VERSIONS = "_metadata"


def own_state(actor: WorkerActor) -> dict[str, Any]:
    """Return the `tensors` of a worker's shards, each by its name in the unsplit model, and the modules' `versions`; of
    first replicas."""
    first_route = [shard for (_, route), shard in actor.homes.items() if route == 0]
    tensors = {name: t for shard in first_route for name, t in shard.evaluated_state_dict().items()}
    return {
        "tensors": tensors if actor.members is None else actor.members.whole(tensors),
        "versions": {name: each for shard in first_route for name, each in shard.slice.versions().items()},
    }


def merged(parts: Iterable[Mapping[str, Any]], place_of: Callable[[str], Any]) -> OrderedDict[str, Tensor]:
    """Return copies of the tensors of all workers on the CPU, sorted by `place_of`, with torch's `_metadata`.

    Copies: of workers in this process these are the parameters themselves, and tied ones share storage, which
    safetensors refuses.
    """
    parts = list(parts)
    found = {name: tensor.cpu().clone() for part in parts for name, tensor in part["tensors"].items()}
    whole = OrderedDict((name, found[name]) for name in sorted(found, key=place_of))
    # A list of layers stands for an `nn.Sequential`.
    versions = {"": {"version": 1}} | {name: each for part in parts for name, each in part["versions"].items()}
    setattr(whole, _VERSIONS, OrderedDict(sorted(versions.items())))  # wherever stages are
    return whole


def save_whole(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a safetensors file, complete or not at all.

    Raises:
        StorageError: it cannot be written.
        ConfigError: a device, say, has that name, not a regular file; another file would take its place.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError(f"{path}: is not a regular file")
    try:
        versions = {"versions": json.dumps(getattr(state, _VERSIONS))} if hasattr(state, _VERSIONS) else {}
        with replacing(Path(path).absolute()) as partial:
            write(partial, {name: tensor.contiguous() for name, tensor in state.items()}, versions)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}; what was there is as it was"
        ) from error


def save_adapters(actor: WorkerActor, where: Callable[[], Path], names: frozenset[str]) -> Path:
    """Let the model on worker 0, which has room for so few tensors, write its adapters; return their folder.

    Args:
        where: makes the folder's path; called on worker 0.
        names: of the adapters' tensors.

    Raises:
        StorageError: it cannot be written; on every worker.
    """
    own = {name: tensor for name, tensor in own_state(actor)["tensors"].items() if name in names}
    parts = actor.gather("adapters (save_pretrained)", own)

    def write() -> str:
        if parts is None or not is_first_member(actor):
            return ""
        tensors = {name: tensor.cpu() for part in parts for name, tensor in part.items()}
        model: Any = next(iter(actor.shards.values())).slice.modules[0]
        how = {"save_embedding_layers": False} if hasattr(model, "get_base_model") else {}  # of peft, or adapted by it
        target = where()
        try:
            target.mkdir(parents=True, exist_ok=True)  # else a file there is a line in a log, and nothing is written
            model.save_pretrained(str(target), state_dict=tensors, **how)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{target}: cannot be written: {getattr(error, 'strerror', '') or error}") from error
        return str(target)

    return Path(together(actor, "adapters written", write, str)[1][0])
