"""Adapters are written as peft writes them: from all workers' tensors, by worker 0, which has room for so few."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..dependency import StorageError
from ..model.adapters import Adapter
from ..workers.actor import WorkerActor
from .together import together
from .whole import own_state, save_whole

_FILE, _DEFAULT = "adapter_model.safetensors", "default"


def save_adapters(actor: WorkerActor, folder: Path, adapters: Mapping[str, Adapter]) -> None:
    """Write a folder that `PeftModel.from_pretrained` reads; adapters with names of their own get folders in it.

    Raises:
        StorageError: it cannot be written; on every worker.
    """
    wanted = {name for adapter in adapters.values() for name in adapter.names.values()}
    own = {name: tensor for name, tensor in own_state(actor)["tensors"].items() if name in wanted}
    parts = actor.gather("adapters (save_pretrained)", own)

    def write() -> None:
        if parts is not None:
            tensors = {name: tensor.cpu() for part in parts for name, tensor in part.items()}
            for name, adapter in adapters.items():
                _write(folder if name == _DEFAULT else folder / name, adapter, tensors)

    together(actor, "adapters written", write)


def _write(place: Path, adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        save_whole({told: tensors[name] for told, name in adapter.names.items()}, place / _FILE)
        adapter.config.save_pretrained(str(place), auto_mapping_dict=adapter.mapping)
    except OSError as error:
        raise StorageError(f"{place}: cannot be written: {error.strerror or error}") from error
