"""Weights in a folder as Hugging Face's `save_pretrained` writes it; each worker reads its tensors alone.

Or in one file, put together from the tensors of all workers.
"""

import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..dependency import ConfigError, EpochEnds, Stalled, StorageError
from ..system.files import refused, replacing, sync
from ..workers.actor import WorkerActor
from ..workers.compute.parts.divided import local, part_of
from ..workers.compute.sequences.slices import plain_name
from ..workers.compute.shard import Shard
from . import folder
from .collective import agreed, everywhere, is_first_member, is_first_process, together
from .json_values import by_file, opened, write
from .shard_state import model_tensors
from .writing import Snapshot, awaited_files, index_of

_SINGLE = "model.safetensors"
_SHARD, _PART = re.compile(r"model(\.2)?-\d{5}-of-\d{5}\.safetensors"), re.compile(r"part-\d{5}\.json")
_WRITTEN = (".json", ".safetensors")


class Loaded(NamedTuple):
    """How the names in a folder and in a model have met."""

    #: tensors of the model that the folder lacks; they are as they were
    missing: list[str]
    #: tensors of the folder that the model does not have
    unexpected: list[str]


class Pretrained:
    """The tensors of a folder, by name; none is read before it is asked for.

    Raises:
        ConfigError: there are no safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        is_file = Path(path).is_file()
        self.path, single = (Path(path).parent, Path(path).name) if is_file else (Path(path), _SINGLE)
        if (self.path / single).is_file():
            with opened(self.path / single, ConfigError) as tensors:
                #: name of each tensor -> its file
                self.files: dict[str, str] = dict.fromkeys(tensors.keys(), single)
        elif (self.path / folder.INDEX).is_file():
            index = folder.read_json(self.path / folder.INDEX)
            if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
                raise ConfigError(f"{self.path / folder.INDEX}: is damaged: it has no weight_map")
            self.files = {str(key): str(file) for key, file in index["weight_map"].items()}
            for file in sorted(set(self.files.values())):
                if Path(file).name != file or not (self.path / file).is_file():
                    raise ConfigError(f"{self.path / file}: is missing, and the index names it")
        else:
            raise ConfigError(f"{path}: has neither {folder.INDEX} nor {_SINGLE}; save it again as safetensors")

    def prefix(self, names: set[str]) -> tuple[str, str]:
        """Return the prefix of the model's names and the prefix of the folder's names that replaces it.

        A model with a head calls its body by one more name than the body alone does.
        """
        if not names & self.files.keys():
            for name in sorted(names):
                first, _, rest = name.partition(".")
                if rest in self.files:
                    return f"{first}.", ""
            for name in sorted(self.files):
                first, _, rest = name.partition(".")
                if rest in names:
                    return "", f"{first}."
        return "", ""

    def find(self, own: Mapping[str, Tensor], change: tuple[str, str]) -> tuple[dict[str, str], set[str]]:
        """Return the folder's names for a shard's tensors, and the shard's names without one.

        Another name of a tensor that has numbers needs none.

        Raises:
            ConfigError: a tensor has another shape, or a file is damaged.
        """
        take, put = change
        found = {name: put + name.removeprefix(take) for name in own}
        found = {name: other for name, other in found.items() if other in self.files}
        for file, name, tensors in self._each(found):
            shape = tuple(tensors.get_slice(found[name]).get_shape())
            if shape != own[name].shape:
                shapes = f"has shape {shape}, and {tuple(own[name].shape)} in this model"
                raise ConfigError(f"{self.path / file}: tensor {found[name]} {shapes}")
        filled = {_place(own[name]) for name in found}
        return found, {name for name, tensor in own.items() if _place(tensor) not in filled}

    def fill(self, own: Mapping[str, Tensor], found: Mapping[str, str]) -> None:
        """Copy the numbers of a shard's tensors into them."""
        with torch.no_grad():
            for _, name, tensors in self._each(found):
                own[name].copy_(part_of(tensors.get_tensor(found[name]), own[name]))

    def _each(self, found: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
        """Yield the file, the name of each tensor, and the open file's entry."""
        for file, names in by_file({name: self.files[other] for name, other in found.items()}).items():
            with opened(self.path / file, ConfigError) as tensors:
                yield from ((file, name, tensors) for name in names)


def load(actor: WorkerActor, where: Path, strict: bool) -> Loaded:
    """Let all workers read their weights from a folder of safetensors.

    Raises:
        ConfigError: something does not fit; nothing has changed on any worker.
    """
    # A parameter may have another name too, that of the stage which has it first.
    own = {shard: {**dict(shard.named_parameters()), **model_tensors(shard)} for shard in actor.shards.values()}
    told = everywhere(actor, "names", sorted(name for tensors in own.values() for name in tensors))
    names = {name for each in told for name in each}

    def find() -> tuple[Pretrained, dict[Shard, tuple[dict[str, str], set[str]]]]:
        pretrained = Pretrained(where)
        change = pretrained.prefix(names)
        return pretrained, {shard: pretrained.find(tensors, change) for shard, tensors in own.items()}

    def names_of(read: tuple[Pretrained, dict[Shard, tuple[dict[str, str], set[str]]]]) -> list[list[str]]:
        lacking = {name for _, lacks in read[1].values() for name in lacks}
        return [sorted(lacking), sorted({used for here, _ in read[1].values() for used in here.values()})]

    (pretrained, found), told = together(actor, "pretrained read", find, names_of)
    missing, used = ({name for each in told for name in each[at]} for at in (0, 1))
    loaded = Loaded(sorted(missing), sorted(pretrained.files.keys() - used))
    if strict and (loaded.missing or loaded.unexpected):
        raise ConfigError(_unmet(where, loaded))
    for shard, (here, _) in found.items():
        pretrained.fill(own[shard], here)
        if shard.versions is not None and shard.versions.reference is not None:
            with shard.versions.evaluated():
                pretrained.fill({**own[shard], **dict(shard.named_parameters())}, here)
    return loaded


def save(actor: WorkerActor, where: Callable[[], Path], config: Any, left_out: Collection[str], wait_s: float) -> Path:
    """Write the weights alone, as `from_pretrained` takes them; return their folder.

    Args:
        where: makes the folder's path; called on worker 0.
        left_out: names of tensors that are written under another name.

    Raises:
        StorageError: on every worker, if it failed on one; the folder is as it was.
    """
    place = Path(agreed(actor, "export", lambda: str(folder.begin(where(), 0))))
    assert place != Path(), "the place is removed in the end, and this one is the current folder"

    def write() -> None:
        try:
            snapshot = Snapshot(actor, left_out=left_out)
            snapshot.write(place)
            if snapshot.is_first:
                files, _ = awaited_files(place, snapshot.processes, wait_s, snapshot.look)
                if config is not None:
                    config.write(place)
                _move(place, files)
        except (EpochEnds, Stalled):  # a consequence
            raise
        except (StorageError, OSError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            said = getattr(cause, "strerror", None) or cause
            raise StorageError(f"{place.parent}: cannot be written: {said}; what was there is as it was") from error

    try:
        together(actor, "exported", write)
    finally:
        if is_first_process(actor):
            shutil.rmtree(place, ignore_errors=True)
            with suppress(OSError):  # if it is empty
                place.parent.rmdir()
    return place.parent


def _move(place: Path, files: Mapping[str, Any]) -> None:
    """Move weights from a hidden folder into that around it, in the place of weights that are there.

    Readers look for a single file first, then for an index. The rename of one of these makes the new weights count,
    and no file that the old ones need is removed before it.
    """
    target, index = place.parent, place / folder.INDEX
    old = set()
    if (target / folder.INDEX).is_file():
        with suppress(ConfigError, AttributeError, TypeError):
            old = set(folder.read_json(target / folder.INDEX).get("weight_map", {}).values())
    if len(files) == 1:
        new, last = {name: _SINGLE for name in files}, _SINGLE
    else:
        again = "model.2-" if old & files.keys() else "model-"
        new, last = {name: name.replace("model-", again, 1) for name in files}, folder.INDEX
        folder.write_json(index, index_of({new[name]: each for name, each in files.items()}))
    for name, final in new.items():
        (place / name).rename(place / final)
    written = [path.name for path in place.iterdir() if path.suffix in _WRITTEN and not _PART.fullmatch(path.name)]
    for name in sorted(written, key=lambda name: name == last):
        (place / name).replace(target / name)
    files_of_old = [path for path in target.glob("model*.safetensors") if _SHARD.fullmatch(path.name)]
    for path in (target / _SINGLE, target / folder.INDEX, *files_of_old):
        if path.name not in written:
            path.unlink(missing_ok=True)
    sync(target)


def _unmet(where: str | Path, loaded: Loaded) -> str:
    def few(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    lacks = f"has no tensor for {few(loaded.missing)}" if loaded.missing else ""
    more = f"has {few(loaded.unexpected)}, which this model does not have" if loaded.unexpected else ""
    return f"{where}: {'; '.join(filter(None, (lacks, more)))}; strict=False leaves out what does not meet"


def _place(tensor: Tensor) -> tuple[int, object, object]:
    return local(tensor).data_ptr(), tensor.shape, tensor.stride()


#: where torch keeps the versions of modules beside a state
_VERSIONS = "_metadata"


def own_state(actor: WorkerActor) -> dict[str, Any]:
    """Return the `tensors` of a worker's shards, each by its name in the unsplit model, and the modules' `versions`; of
    first replicas."""
    first_route = [shard for (_, route), shard in actor.homes.items() if route == 0]
    tensors = {name: t for shard in first_route for name, t in shard.evaluated_state_dict().items()}
    versions = {name: each for shard in first_route for name, each in shard.slice.versions().items()}
    return {"tensors": actor.whole(tensors), "versions": versions}


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
        ConfigError: the name is that of a device or the like, which another file would replace.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError(f"{path}: is not a regular file")
    by_module = {plain_name(f"{n}.").rstrip("."): each for n, each in getattr(state, _VERSIONS, {}).items()}
    versions = {"versions": json.dumps(by_module)} if hasattr(state, _VERSIONS) else {}
    with refused(StorageError, f"{path}: cannot be written", "; what was there is as it was"):
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path).absolute()) as partial:
            write(partial, {plain_name(name): tensor.contiguous() for name, tensor in state.items()}, versions)


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
