"""A checkpoint is written: a copy of the numbers at once, and everything slow on a thread beside training.

Workers need no message for it. Each leaves a list of what it wrote; worker 0 waits for all lists, writes the manifest
and gives the checkpoint its name.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ..dependency import ConfigError, Stalled
from ..workers.compute.shard import Shard
from . import folder
from .shard_state import described, model_tensors, optimizer_tensors

FORMAT = 1


class Snapshot:
    """What one worker writes: copies on the CPU of its numbers as they are now.

    Args:
        shards: one of each stage that this worker is the first to have.
        also: more tensors, by name, for the file of the optimizer.
    """

    def __init__(self, worker: int, num_workers: int, shards: Sequence[Shard], also: Mapping[str, Tensor]) -> None:
        self.worker, self.num_workers = worker, num_workers
        self._stages = {shard.stage: described(shard) for shard in shards}
        model = {name: _copied(tensor) for shard in shards for name, tensor in model_tensors(shard).items()}
        rest = {name: _copied(tensor) for shard in shards for name, tensor in optimizer_tensors(shard).items()}
        self._files = {"model": model, "optimizer": rest | {name: _copied(tensor) for name, tensor in also.items()}}

    def write(self, place: Path) -> None:
        """Write the files and, when they are on the disk, the list of them.

        Raises:
            ConfigError: a file cannot be written.
        """
        files: dict[str, Any] = {}
        try:
            for what, tensors in self._files.items():
                if tensors:
                    name = f"{what}-{self.worker + 1:05}-of-{self.num_workers:05}.safetensors"
                    files[name] = {"what": what, "bytes": 0, "tensors": {key: _form(t) for key, t in tensors.items()}}
                    files[name]["bytes"] = _write(place / name, tensors)
            _list(place, self.worker, {"files": files, "stages": self._stages})
        except ConfigError as error:
            for name in files:  # which makes room for the list on a full disk
                (place / name).unlink(missing_ok=True)
            _list(place, self.worker, {"failed": str(error)})
            raise


def _copied(tensor: Tensor) -> Tensor:
    # Several names may share memory, which safetensors refuses, and training goes on while this is written.
    return tensor.detach().to("cpu", copy=True).contiguous()


def _form(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _write(path: Path, tensors: dict[str, Tensor]) -> int:
    """Write a file of tensors and return its size."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        folder.sync(path)
        return path.stat().st_size
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: Exception) -> ConfigError:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"checkpoint {path}: cannot be written: {said}; the checkpoints before it are as they were")


def _list(place: Path, worker: int, content: Any) -> None:
    path = place / _part(worker)
    try:
        folder.write_json(path, content)
    except OSError as error:
        raise _unwritten(path, error) from error


def _part(worker: int) -> str:
    return f"part-{worker + 1:05}.json"


def finish(place: Path, num_workers: int, about: dict[str, Any], keep: int | None, deadline_s: float) -> Path:
    """Wait for all workers' lists, write the manifest, give the checkpoint its name and return it.

    Raises:
        ConfigError: the disk is full, or is not the same for all workers.
        Stalled: a worker's list has not come.
    """
    parts = [folder.read_json(_awaited(place / _part(worker), deadline_s)) for worker in range(num_workers)]
    for part in parts:
        if "failed" in part:
            raise ConfigError(part["failed"])
    files = {name: each for part in parts for name, each in part["files"].items()}
    for name, each in files.items():
        if not (place / name).is_file() or (place / name).stat().st_size != each["bytes"]:
            raise ConfigError(
                f"checkpoint {place / name}: is not as its worker wrote it; all must see the same storage"
            )
    model: dict[str, str] = {}
    for name, each in files.items():
        if each["what"] == "model":
            for key in each["tensors"]:
                model.setdefault(key, name)  # tied weights are on several workers, with the same numbers
    stages = {stage: each for part in parts for stage, each in part["stages"].items()}
    size = sum(each["bytes"] for each in files.values() if each["what"] == "model")
    try:
        folder.write_json(place / folder.INDEX, {"metadata": {"total_size": size}, "weight_map": model})
        folder.write_json(place / folder.MANIFEST, {"format": FORMAT, **about, "files": files, "stages": stages})
        for worker in range(num_workers):
            (place / _part(worker)).unlink()
        return folder.commit(place, about["step"], keep)
    except OSError as error:
        raise _unwritten(place, error) from error


def _awaited(path: Path, deadline_s: float) -> Path:
    end, pause = time.monotonic() + deadline_s, 0.002
    while not path.exists():
        if time.monotonic() > end:
            raise Stalled(f"checkpoint {path.parent}: {path.name} has not come in {deadline_s:g} s; its worker failed")
        time.sleep(pause)
        pause = min(0.2, 2 * pause)
    return path


class Writing(threading.Thread):
    """Writes one checkpoint beside training: this process's snapshots and, where worker 0 is, what makes it one."""

    def __init__(
        self, snapshots: Sequence[Snapshot], place: Path, about: dict[str, Any], keep: int | None, deadline_s: float
    ) -> None:
        super().__init__(name="checkpoint", daemon=False)
        self._snapshots, self._place, self._about = snapshots, place, about
        self._keep, self._deadline_s = keep, deadline_s
        self.error: Exception | None = None
        self.path: Path | None = None
        self.start()

    def run(self) -> None:
        """Write."""
        try:
            for snapshot in self._snapshots:
                snapshot.write(self._place)
            first = self._snapshots[0]
            if first.worker == 0:
                self.path = finish(self._place, first.num_workers, self._about, self._keep, self._deadline_s)
        except Exception as error:
            self.error = error
            if self._snapshots[0].worker == 0:
                shutil.rmtree(self._place, ignore_errors=True)
