"""Reading of a checkpoint: it is checked first, so that a mismatch is reported before anything has changed.

All workers resume from it together, or none does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dependency import ConfigError, Damaged, PipeError
from ..system.files import DAMAGED
from ..workers.actor import WorkerActor
from ..workers.compute.parts.divided import is_divided, part_of
from ..workers.compute.sequences.slices import plain_name
from . import folder
from .collective import together
from .json_values import NAMES, by_file, checksum, decoded, opened
from .resumption import Resumption
from .shard_state import Stages, buffer_of, column, model_tensors, of_route, own_buffers, put, shares
from .writing import FORMAT, own_routes


class Checkpoint:
    """One that is complete.

    Args:
        path: the checkpoint, or a folder, for its newest.

    Raises:
        ConfigError: there is none.
        Damaged: a file of it is.
    """

    def __init__(self, path: str | Path) -> None:
        found = folder.newest(Path(path))
        if found is None and Path(path) in folder.named(Path(path).parent):
            raise Damaged(f"checkpoint {Path(path) / folder.MANIFEST}: is missing")
        if found is None:
            what = "holds no complete checkpoint" if Path(path).is_dir() else "there is no such folder"
            raise ConfigError(f"checkpoint {path}: {what}")
        self.path = found
        try:
            manifest = folder.read_json(found / folder.MANIFEST)
        except ConfigError as error:
            raise Damaged(str(error)) from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ConfigError(f"{found / folder.MANIFEST}: is not of format {FORMAT}, which this version reads")
        if manifest.pop("sum", None) not in (None, folder.sum_of(manifest)):  # there was none at first
            raise Damaged(f"{found / folder.MANIFEST}: is damaged: it is not what was written")
        try:
            self.about: dict[str, Any] = {key: each for key, each in manifest.items() if key not in ("files", "stages")}
            self.step = int(manifest["step"])
            if not 0 <= self.step < 2**53:
                raise ValueError(f"step {self.step}")
            #: the user's values that were saved with it
            self.extra = decoded(manifest.get("extra"))
            #: name of a tensor -> (file, dtype and shape, name there: once it had names of wrappers), by use
            self._tensors: dict[str, dict[str, tuple[str, list[Any], str]]] = {"model": {}, "optimizer": {}}
            #: names of the model's tensors
            self.names = self._tensors["model"].keys()
            self._sums: dict[str, dict[str, int]] = {}
            sizes: dict[str, int] = {}
            for name, each in manifest["files"].items():
                self._sums[name], sizes[name] = each.get("sums", {}), int(each["bytes"])
                for key, form in each["tensors"].items():
                    self._tensors[each["what"]].setdefault(plain_name(key), (name, form, key))
            #: number of routes with separate buffers, the first included
            self.num_routes = 1 + max((buffer_of(key)[0] for key in self._tensors["optimizer"]), default=0)
            told = dict(manifest["stages"])
            self.stages = self._described(told)
            #: of each route with separate weights
            self.routes = [
                self._described({stage: each["routes"][number] for stage, each in told.items()}, of_route(number, ""))
                for number in range(max((len(each.get("routes", ())) for each in told.values()), default=0))
            ]
        except DAMAGED as error:
            raise Damaged(f"{found / folder.MANIFEST}: is damaged: {type(error).__name__} {error}") from error
        for name, size in sizes.items():
            file = self.path / name
            if Path(name).name != name or not file.is_file():
                raise Damaged(f"checkpoint {file}: is missing")
            if file.stat().st_size != size:
                raise Damaged(f"checkpoint {file}: has {file.stat().st_size} bytes of {size}: it was cut off")

    def buffers(self, own: Iterable[str]) -> dict[str, Tensor]:
        """Return the numbers of these buffers, named as by `own_buffers`, by their names in the model."""
        there = [key for key in own if key in self._tensors["optimizer"]]
        return {buffer_of(key)[1]: tensor for key, tensor in self.rest(there).items()}

    def apart(self) -> list[str]:
        """Return the names of the buffers that differed between routes."""
        sums = {plain_name(key): each for of_file in self._sums.values() for key, each in of_file.items()}
        named = [(key, *buffer_of(key)) for key in self._tensors["optimizer"]]
        return sorted({name for key, route, name in named if route and sums.get(key) != sums.get(name)})

    def model(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the numbers for these parameters and buffers.

        Raises:
            ConfigError: there is none for one, or they are another model's.
        """
        for name, tensor in own.items():
            if name not in self._tensors["model"]:
                raise ConfigError(f"checkpoint {self.path}: has no tensor {name}: it is of another model")
            file, (dtype, *shape), _ = self._tensors["model"][name]
            expected = str(tensor.dtype).removeprefix("torch.")
            if tuple(shape) != tuple(tensor.shape) or dtype != expected:
                kinds = f"is {dtype} of shape {tuple(shape)}, and {expected} of shape {tuple(tensor.shape)} in this one"
                raise ConfigError(f"checkpoint {self.path / file}: tensor {name} {kinds}")
        return self.tensors("model", own, own)

    def _described(self, told: dict[str, Any], prefix: str = "") -> Stages:
        names = [name.removeprefix(prefix) for name in self._tensors["optimizer"] if name.startswith(prefix)]
        return Stages(told, names, partial(self.rest, prefix=prefix))

    def rest(self, names: Iterable[str], own: Mapping[str, Tensor] = {}, *, prefix: str = "") -> dict[str, Tensor]:
        """Return tensors of optimizers, or saved with them, with names that begin with `prefix`.

        Args:
            own: of a tensor, the parameter that it belongs to.
        """
        of = {prefix + name: parameter for name, parameter in own.items()}
        found = self.tensors("optimizer", [prefix + name for name in names], of)
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def tensors(self, what: str, names: Iterable[str], own: Mapping[str, Tensor] = {}) -> dict[str, Tensor]:
        """Read these tensors of the `model` or the `optimizer`s; of a tensor that members divide, the part here."""
        files = {}
        for name in names:
            if name not in self._tensors[what]:
                raise Damaged(f"checkpoint {self.path}: is damaged: it has no tensor {name}")
            files[name] = self._tensors[what][name][0]
        found: dict[str, Tensor] = {}
        for file, keys in by_file(files).items():
            with opened(self.path / file, Damaged) as tensors:
                for name in keys:  # only one is whole at a time
                    there = self._tensors[what][name][2]
                    whole = tensors.get_tensor(there)
                    if (stored := self._sums[file].get(there)) is not None and checksum(whole) != stored:
                        raise Damaged(f"checkpoint {self.path / file}: tensor {name} is not what was written")
                    found[name] = _here(name, whole, own[name]) if name in own else whole
        return found


def _here(name: str, whole: Tensor, own: Tensor) -> Tensor:
    """Return the part of a tensor that is here, if members divide `own`, the parameter that it belongs to.

    Raises:
        ConfigError: it is no number and has another shape than that.
    """
    if whole.shape == own.shape:
        return part_of(whole, own)
    if is_divided(own) and whole.numel() > 1:
        raise ConfigError(f"{name}: has not the shape of its parameter, which members share; take another optimizer")
    return whole


class Restored(NamedTuple):
    """The checkpoint that a pipeline resumed from."""

    path: Path
    #: training steps done
    step: int
    #: the values that were given as `extra` when it was saved
    extra: Any


class Prepared(NamedTuple):
    """The read parts of a checkpoint besides the tensors that each worker takes."""

    checkpoint: Checkpoint
    results: Resumption
    #: as `random_state`
    random: dict[str, torch.Tensor]


def put_all(actor: WorkerActor, where: str | Path, separate: bool, num_routes: int) -> Prepared:
    """Put all of a checkpoint in its place on this worker, if it fits on all.

    Raises:
        ConfigError: it does not fit, or is damaged; on every worker, and nothing has changed on any.
    """
    own = {shard: model_tensors(shard) for shard in actor.shards.values()}
    steps: list[Callable[[], None]] = []
    references: list[Callable[[], None]] = []

    @understood(where)
    def prepare() -> Prepared:
        checkpoint = Checkpoint(where)
        results = Resumption(checkpoint.about)
        # Another number of routes resumes from their reference, with the state of the first one's optimizer.
        apart = separate and len(checkpoint.routes) == len(own_routes(actor))
        for (_, route), shard in actor.shards.items():
            weights, stages = checkpoint.model(own[shard]), checkpoint.stages
            if apart:
                assert shard.versions is not None
                references.append(partial(shard.versions.refer_to, weights))
                stages = checkpoint.routes[route % len(checkpoint.routes)]
                weights = stages.read(own[shard], {})
            if num_routes * shares(actor) == checkpoint.num_routes:
                weights |= checkpoint.buffers(own_buffers(shard, column(actor, route)))
            steps.extend([partial(put, shard, weights), stages.prepare(shard, route, num_routes)])
        return Prepared(checkpoint, results, checkpoint.rest(NAMES))

    def tell(read: Prepared) -> list[Any]:
        return [read.checkpoint.path.name, sorted({name for tensors in own.values() for name in tensors})]

    prepared, told = together(actor, "checkpoint read", prepare, tell)
    if len({path for path, _ in told}) > 1:
        raise ConfigError(f"checkpoint {where}: workers see different ones, {', '.join(path for path, _ in told)}")
    checkpoint = prepared.checkpoint
    left = checkpoint.names - {name for _, names in told for name in names}
    if left:
        raise ConfigError(f"checkpoint {checkpoint.path}: has {min(left)}, which this model does not have")
    with understood(checkpoint.path):
        for step in steps:
            step()
        actor.go_on_at(checkpoint.step, checkpoint.stages.updates)
        for shard in actor.shards.values():
            if shard.versions is not None:
                shard.versions.reference = None  # from a checkpoint all routes resume alike
        for refer in references:
            refer()
    return prepared


@contextmanager
def understood(checkpoint: str | Path) -> Iterator[None]:
    """Turn an exception about a malformed manifest into a sentence.

    Raises:
        Damaged: instead of that.
    """
    try:
        yield
    except PipeError:
        raise
    except DAMAGED as error:
        what = f"{type(error).__name__}: {error}"
        raise Damaged(f"checkpoint {checkpoint}: is damaged, or of another version: {what}") from error
