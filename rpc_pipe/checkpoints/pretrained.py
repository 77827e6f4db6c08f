"""Weights from a folder that Hugging Face's `save_pretrained` wrote; each worker reads its own tensors alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..dependency import ConfigError
from . import folder
from .reading import read

_SINGLE = "model.safetensors"


class Loaded(NamedTuple):
    """How the names in a folder and in a model have met."""

    #: tensors of the model for which the folder has no numbers; they are as they were
    missing: list[str]
    #: tensors of the folder that the model does not have
    unexpected: list[str]


class Pretrained:
    """The tensors of a folder, by name; none is read before it is asked for.

    Raises:
        ConfigError: there are no safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if (self.path / folder.INDEX).is_file():
            index = folder.read_json(self.path / folder.INDEX)
            if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
                raise ConfigError(f"{self.path / folder.INDEX}: is damaged: it has no weight_map")
            self._files: dict[str, str] = {str(key): str(file) for key, file in index["weight_map"].items()}
            for file in sorted(set(self._files.values())):
                if Path(file).name != file or not (self.path / file).is_file():
                    raise ConfigError(f"{self.path / file}: is missing, and the index names it")
        elif (self.path / _SINGLE).is_file():
            self._files = dict.fromkeys(self._names(_SINGLE), _SINGLE)
        else:
            raise ConfigError(
                f"{path}: has neither {folder.INDEX} nor {_SINGLE}; pickles (.bin) can run code and are not read: "
                "save the model again as safetensors"
            )

    def _names(self, file: str) -> list[str]:
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                return list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path / file}: cannot be read: {error}") from error

    def prefix(self, names: set[str]) -> tuple[str, str]:
        """Return what to take from the front of a model's name, and what to put there, to have the folder's name.

        A model with a head calls its body by one more name than the body alone does.
        """
        if not names & self._files.keys():
            for name in sorted(names):
                first, _, rest = name.partition(".")
                if rest in self._files:
                    return f"{first}.", ""
            for name in sorted(self._files):
                first, _, rest = name.partition(".")
                if rest in names:
                    return "", f"{first}."
        return "", ""

    def tensors(self, own: Mapping[str, Tensor], change: tuple[str, str]) -> tuple[dict[str, Tensor], set[str]]:
        """Return the numbers for a shard's tensors, and the names in the folder that they have.

        Names for which there are none are left out, unless they are another name of a tensor that has some.

        Raises:
            ConfigError: a tensor has another shape.
        """
        take, put = change
        stored = {name: put + name.removeprefix(take) for name in own}
        stored = {name: other for name, other in stored.items() if other in self._files}
        by_file: dict[str, list[str]] = {}
        for other in stored.values():
            by_file.setdefault(self._files[other], []).append(other)
        numbers: dict[str, Tensor] = {}
        for file, others in by_file.items():
            numbers |= read(self.path / file, others)
        found = {name: numbers[other] for name, other in stored.items()}
        for name, tensor in found.items():
            if tensor.shape != own[name].shape:
                raise ConfigError(
                    f"{self.path / self._files[stored[name]]}: tensor {stored[name]} has shape {tuple(tensor.shape)}, "
                    f"and {tuple(own[name].shape)} in this model"
                )
        given = {_place(own[name]): tensor for name, tensor in found.items()}
        tied = {name: given[_place(tensor)] for name, tensor in own.items() if _place(tensor) in given}
        return tied | found, set(stored.values())

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)


def begin_export(where: Path) -> Path:
    """Make the place in `where` in which weights are written.

    Raises:
        ConfigError: it cannot be made, or other weights there would be read instead.
    """
    for name in (_SINGLE, "pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (where / name).exists():
            raise ConfigError(f"{where}: has a {name}, which may be read instead; choose another folder")
    return folder.begin(where, 0)


def _place(tensor: Tensor) -> tuple[int, object, object]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
