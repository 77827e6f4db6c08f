"""A checkpoint is written: a copy of the numbers at once, and everything slow on a thread beside training.

Workers need no message for it. Each leaves a list of its files; worker 0 waits for all lists, writes the manifest
and gives the checkpoint its name.
"""

import atexit
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..dependency import ConfigError, EpochEnds, Stalled, StorageError
from ..system.at_exit import at_exit
from ..system.files import refused
from ..workers.actor import WorkerActor
from ..workers.compute.parts.divided import local
from ..workers.compute.shard import Shard
from ..workers.transport.payload import tensors_of
from . import folder
from .json_values import checksum, is_plain, random_state, write

from .shard_state import (  # isort: skip
    column, described, evaluated_tensors, held_tensors, model_tensors, of_route, optimizer_tensors, own_buffers,
    state_tensors,
)  # fmt: skip

logger = logging.getLogger(__name__)

FORMAT = 1
#: bytes a second that extend the deadline of a worker's files: slower storage is too slow for training
_LEAST_BYTES_A_SECOND = 10e6
#: seconds for the manifest beyond the deadline
_MANIFEST_S = 10.0
#: how a folder ends that stands for a list that cannot be written
_FAILED = ".failed"


class Snapshot:
    """A worker's part of a checkpoint: copies on the CPU of its present numbers.

    Args:
        separate: whether routes have separate weights, which are pulled to a reference, and so are written, too.
        left_out: names of tensors that are not written; then only weights are, each once. None: everything is written.
        epoch: of the workers that write.
    """

    def __init__(
        self, actor: WorkerActor, *, separate: bool = False, left_out: Collection[str] | None = None, epoch: int = 0
    ) -> None:
        self.epoch = epoch
        # Processes that write a part each: workers, or their members.
        self._members = members = actor.members
        #: raises an error when a worker's list cannot arrive any more
        self.look = actor.carrier.look_for_fault
        count, index = (1, 0) if members is None else (members.count, members.index)
        self.process = actor.worker * count + index
        self.processes = [w * count + each for w in sorted(actor.carrier.workers) for each in range(count)]
        first = [shard for (_, route), shard in actor.homes.items() if route == 0]
        weights_alone = left_out is not None
        model: dict[str, Tensor] = {}
        for shard in first:
            elsewhere = _written_elsewhere(shard) if weights_alone else ()
            named = evaluated_tensors(shard).items()
            left = {n for n, t in named if n in (left_out or ()) or local(t).data_ptr() in elsewhere}
            of_first = {name for name, _ in named} - {name for name, _ in shard.named_parameters()}
            model |= self._copied({name: tensor for name, tensor in named if name not in left}, of_first)
        self._stages: dict[str, dict[str, Any]] = {}
        rest = random_state() if self.is_first and not weights_alone else {}
        if not weights_alone:
            for shard in actor.homes.values():
                _refuse_lost(shard.optimizer)
            self._stages = {str(shard.stage): described(shard, members) for shard in first}
            for (stage, number), shard in actor.homes.items():
                own = optimizer_tensors(shard) if number == 0 else held_tensors(shard, number)
                if number and shard.updating.owned is not None:
                    self._stages[f"{stage}/{number}"] = described(shard, members)
                    own |= state_tensors(shard)
                rest |= self._copied(own)
                alike = members is not None and members.index % members.alike  # the first of these writes
                buffers = {} if alike else own_buffers(shard, column(actor, number))
                rest |= self._copied(buffers, apart=members is not None and members.rows)
        for number, route in enumerate(own_routes(actor) if separate and first else ()):
            for shard in route:
                self._stages[str(shard.stage)].setdefault("routes", []).append(described(shard, None))
                own = model_tensors(shard) | optimizer_tensors(shard)
                rest |= {of_route(number, name): tensor for name, tensor in self._copied(own).items()}
        self._files = {"model": model, "optimizer": rest}

    def _copied(
        self, tensors: Mapping[str, Tensor], first: Collection[str] = (), *, apart: bool = False
    ) -> dict[str, Tensor]:
        """Return copies of the tensors that this process writes, whole.

        Args:
            first: names of the tensors that the first of several members writes.
            apart: whether each of several members writes its values of all.
        """
        mine = tensors.items() if self._members is None or apart else self._members.taken(tensors, first)
        # Several names may share memory, which safetensors refuses, and training continues while this is written.
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in mine}
        for name, tensor in copies.items():
            if not is_plain(tensor):
                raise ConfigError(f"{name}: is a {type(tensor).__name__}, and safetensors has plain tensors alone")
        return copies

    @property
    def is_first(self) -> bool:
        """Whether the process is the first, which completes the checkpoint."""
        return self.process == self.processes[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self._files.values() for tensor in tensors.values())

    def write(self, place: Path) -> None:
        """Write the files and, when they are on the disk, the list of them. The copies are released.

        Raises:
            StorageError: a file cannot be written.
        """
        files: dict[str, Any] = {}
        number, count = self.processes.index(self.process) + 1, len(self.processes)
        try:
            with _refused(place):
                for what, tensors in ((what, tensors) for what, tensors in self._files.items() if tensors):
                    name = f"{what}-{number:05}-of-{count:05}.safetensors"
                    forms = {key: _form(tensor) for key, tensor in tensors.items()}
                    sums = {key: checksum(tensor) for key, tensor in tensors.items()}
                    files[name] = {"what": what, "bytes": write(place / name, tensors), "tensors": forms, "sums": sums}
                folder.write_json(place / _part(self.process), {"files": files, "stages": self._stages})
        except Exception:
            _give_up(place, self.process)
            raise
        finally:
            self._files = {}


def _refuse_lost(optimizer: Optimizer | None) -> None:
    """Refuse an optimizer whose state would not come back, as of two optimizers in one.

    Raises:
        ConfigError: it writes down tensors that are not in its `state`, or that is not kept.
    """
    if optimizer is None:
        return
    told, state = {}, optimizer.state
    with suppress(KeyError):  # of optimizers that share one `state`, torch writes none down
        told = optimizer.state_dict()
    kept = [*tensors_of(dict(state)), *tensors_of([{**group, "params": ()} for group in optimizer.param_groups])]
    if state is not optimizer.state or len(set(map(id, tensors_of(told)))) > len(set(map(id, kept))):
        name = type(optimizer).__name__
        why = f"optimizer {name}: has tensors outside of `state[parameter]`, which a checkpoint would lose"
        raise ConfigError(f"{why}; keep them there, in one dict, as by self.state = second.state = first.state")


def own_routes(actor: WorkerActor) -> list[list[Shard]]:
    """Return a worker's shards by route, where each route has separate weights."""
    routes = sorted({route for _, route in actor.homes})
    return [[shard for (_, route), shard in actor.homes.items() if route == each] for each in routes]


def _written_elsewhere(shard: Shard) -> set[int]:
    """Return where the parameters are that an earlier stage has, too."""
    parameters, shared = dict(shard.named_parameters()), shard.slice.shared
    elsewhere = [name for name in shared if name in parameters and min(shared[name]) < shard.stage]
    return {local(parameters[name]).data_ptr() for name in elsewhere}


def _form(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _refused(path: Path) -> AbstractContextManager[None]:
    return refused(StorageError, f"checkpoint {path}: cannot be written", "; checkpoints before it are as they were")


def _give_up(place: Path, worker: int) -> None:
    """Inform worker 0, which waits for this worker's list, that there will be none."""
    with suppress(OSError):  # a folder needs no descriptor, and an empty one no room
        (place / _part(worker)).with_suffix(_FAILED).mkdir()


def _part(worker: int) -> str:
    return f"part-{worker + 1:05}.json"


def awaited_files(
    place: Path, workers: Sequence[int], deadline_s: float, look: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the files and the stages of all workers' lists."""
    end = time.monotonic() + deadline_s
    parts = [folder.read_json(_awaited(place / _part(worker), end, deadline_s, look)) for worker in workers]
    files = {name: each for part in parts for name, each in part["files"].items()}
    for name, each in files.items():
        path = place / name
        if not path.is_file() or path.stat().st_size != each["bytes"]:
            raise StorageError(f"checkpoint {path}: is not as its worker wrote it; all must see the same storage")
    return files, {stage: each for part in parts for stage, each in part["stages"].items()}


def index_of(files: dict[str, Any]) -> dict[str, Any]:
    """Return which file has which tensor, as Hugging Face writes it."""
    of_model = {name: each for name, each in files.items() if each["what"] == "model"}
    found: dict[str, str] = {}
    for name, each in of_model.items():
        for key in each["tensors"]:
            found.setdefault(key, name)  # tied weights are on several workers, with the same numbers
    return {"metadata": {"total_size": sum(each["bytes"] for each in of_model.values())}, "weight_map": found}


def _awaited(path: Path, end: float, deadline_s: float, look: Callable[[], object] = bool) -> Path:
    pause = 0.002
    while not path.exists():
        look()
        if path.with_suffix(_FAILED).exists():
            raise Stalled(f"checkpoint {path.parent}: {path.name} does not come; its worker failed")
        if time.monotonic() > end:
            raise Stalled(f"checkpoint {path.parent}: {path.name} has not come in {deadline_s:g} s; its worker failed")
        time.sleep(pause)
        pause = min(0.2, 2 * pause)
    return path


class Writing(threading.Thread):
    """Writes one checkpoint beside training: this process's snapshots and, where worker 0 is, the manifest.

    A process that ends waits for it, not longer than training would, because its storage may never answer.
    """

    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        place: Path,
        about: dict[str, Any],
        config: Any,
        keep: int | None,
        deadline_s: float,
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        assert place != Path(), "a checkpoint that fails removes its place, and this one is the current folder"
        self._snapshots, self.place, self._deadline_s = snapshots, place, deadline_s
        self._about, self._config, self._keep = about, config, keep
        self._own_s = deadline_s + sum(each.num_bytes for each in snapshots) / _LEAST_BYTES_A_SECOND
        #: whether this process's files are written, or cannot be
        self._own_are = threading.Event()
        self.error: Exception | None = None
        self.path: Path | None = None
        #: whether the script has asked for this checkpoint itself
        self.asked = bool(about.get("asked"))
        #: the epoch of the snapshots, and whether this process writes the manifest
        self.epoch, self.completes = snapshots[0].epoch, snapshots[0].is_first
        self.start()
        self._registered: Callable[[], None] | None = at_exit(self._at_exit)

    def run(self) -> None:
        """Write."""
        try:
            try:
                for snapshot in self._snapshots:
                    snapshot.write(self.place)
            finally:
                self._own_are.set()
            first = self._snapshots[0]
            if first.is_first:
                self.path = self._finish(first)
        except Exception as error:
            self.error = error
            if isinstance(error, EpochEnds):
                self.error = Stalled(f"checkpoint {self.place}: is not complete, as a worker has died")
            if self._snapshots[0].is_first:
                folder.empty(self.place)

    def _finish(self, first: Snapshot) -> Path:
        """Wait for all workers' lists, write the manifest, give the checkpoint its name and return it.

        Raises:
            StorageError: the disk is full, or is not the same for all workers.
            Stalled: a worker's list has not arrived.
        """
        place, about = self.place, self._about
        files, stages = awaited_files(place, first.processes, self._deadline_s, first.look)
        with _refused(place):
            folder.write_json(place / folder.INDEX, index_of(files))
            told = {"format": FORMAT, **about, "files": files, "stages": stages}
            folder.write_json(place / folder.MANIFEST, {**told, "sum": folder.sum_of(told)})
            if self._config is not None:
                self._config.write(place)
            for worker in first.processes:
                (place / _part(worker)).unlink()
            return folder.commit(place, about["step"], self._keep, about.get("job"))

    @property
    def named(self) -> bool:
        """Whether the checkpoint is complete, or given up, as this process sees."""
        return not self.place.exists()

    def take_over(self) -> None:
        """Take the path of a checkpoint from a process that has completed it, and died."""
        self.path = folder.newest(self.place.parent)

    def finished(self) -> Exception | None:
        """Wait until the checkpoint is complete, as far as this process sees; return why it cannot be."""
        if self._registered is not None:
            atexit.unregister(self._registered)
            self._registered = None  # else this thread is kept until cycles are collected
        own = self._own_are.wait(self._own_s)
        if own:
            self.join(self._deadline_s + _MANIFEST_S)
        if not self.is_alive():
            return self.error
        if own:
            return Stalled(f"checkpoint {self.place}: is not complete after {self._deadline_s:g} s")
        workers = ", ".join(str(each.process) for each in self._snapshots)
        why = f"the files of worker {workers} are not written after {self._own_s:.3g} s"
        return StorageError(f"checkpoint {self.place}: {why}; the storage does not answer, or is too slow")

    def discard(self) -> None:
        """Remove the rest of a checkpoint that has failed, when all workers know that."""
        shutil.rmtree(self.place, ignore_errors=True)

    def _at_exit(self) -> None:
        if (error := self.finished()) is not None:  # its result was not read
            logger.error("%s", error)
            if self._snapshots[0].is_first:  # it has waited for the other workers
                self.discard()
