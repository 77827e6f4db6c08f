"""Checkpoints in a folder: their names, the newest, their completeness, and the job that writes them.

    folder/step-00000120/manifest.json                       the other files, and their sizes
                         model.safetensors.index.json        as Hugging Face's: the file of each tensor
                         model-00001-of-00004.safetensors    of worker 0, and so on
                         optimizer-00001-of-00004.safetensors

While it is written a checkpoint has a name that begins with a dot. It gets its name by one rename, after all files
in it have reached the disk.

    folder/.lock        held by worker 0 for as long as it runs: one job writes there at a time
           .job.json    the starters of the workers, on every host, and the checkpoints that were there before

A restart is the same job, and knows its checkpoints, if one of the workers' starters, the launcher or an agent of
torchrun, had started them before. Restarts are not counted, because agents of one job may count differently.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..dependency import ConfigError, StorageError
from ..system import files
from ..workers.actor import WorkerActor
from ..workers.compute.sequences.slices import plain_name
from .collective import everywhere

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
#: of checkpoints that are being written
_HIDDEN = ".step-"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_LOCK, _JOB = ".lock", ".job.json"
#: how long a process that is about to end, as one of the attempt before, is waited for
_ENDING_S, _PAUSE_S = 5.0, 0.1
#: most bytes of a list of tensors
_MOST_BYTES = 2**26
_MOST_NOTED = 300

#: the locked folders, with the descriptors of their locks: to close any descriptor of a file would release its lock
_held: dict[tuple[int, int], int] = {}


def named(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` by name, also damaged ones, the oldest first."""
    there = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [path for *_, path in sorted((int(match[1]), int(match[2] or 0), path) for match, path in there if match)]


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, the oldest first."""
    return [path for path in named(folder) if (path / MANIFEST).is_file()]


def newest(path: Path) -> Path | None:
    """Return `path`, if it is a checkpoint, or else the newest complete one in it; None: there is none."""
    if (path / MANIFEST).is_file():
        return path
    found = complete(path)
    return max(reversed(found), key=_begun) if found else None


def written_by(path: Path) -> dict[str, Any] | None:
    """Return the job that wrote a checkpoint; {} if it does not name one, None if it cannot be read."""
    with suppress(ConfigError, AttributeError, TypeError, ValueError):
        return _facts(read_json(path / MANIFEST).get("job"))
    return None


def _facts(job: Any) -> dict[str, Any]:
    """Return the facts of a job as they are written down, without a beginning that is no time: a file may be edited."""
    found = dict(job or {})
    begun = found.get("begun", 0)
    return found if isinstance(begun, int) and 0 <= begun < 2**63 else found | {"begun": 0}


def is_same(job: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Return whether both are of one script with one model; a job without the fact may be."""
    return not other or all(job.get(name) == other.get(name) for name in ("script", "model"))


def _begun(path: Path) -> int:
    """Return when the job began that wrote a checkpoint; 0 if that is not known."""
    begun: int = (written_by(path) or {}).get("begun", 0)
    return begun


def name(step: int) -> str:
    """Return the name of a checkpoint after `step` steps."""
    return f"step-{step:08}"


def begin(folder: Path, step: int) -> Path:
    """Make the place where a checkpoint is written; remove half-written ones of killed jobs.

    Raises:
        StorageError: it cannot be made.
    """
    with files.refused(StorageError, f"checkpoint folder {folder}: cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_HIDDEN}*"):
            shutil.rmtree(left, ignore_errors=True)
        place = Path(tempfile.mkdtemp(prefix=f"{_HIDDEN}{step:08}.", dir=folder))
        place.chmod(0o777 & ~umask())
    return place


def empty(place: Path) -> None:
    """Remove the files of a checkpoint that fails; a slower worker may still look for its place."""
    with suppress(OSError):
        for path in place.iterdir():
            path.unlink(missing_ok=True)


def umask() -> int:
    """Return which rights new files do not have."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def commit(place: Path, step: int, keep: int | None, job: Any = None) -> Path:
    """Give a complete checkpoint its name; remove all but this one and the newest earlier ones.

    An abandoned run may have left checkpoints of later steps: this one still counts as the newest.

    Args:
        keep: number of checkpoints that stay, this one included; None: all.
        job: the writing job; checkpoints of another script or model are not removed.
    """
    files.sync(place)
    folder, final = place.parent, place.parent / name(step)
    count = 0
    while final.exists():  # the same step was saved before: the old files stay until these are there
        count += 1
        final = folder / f"{name(step)}.{count}"
    place.rename(final)
    files.sync(folder)
    mine = (path for path in complete(folder) if path != final and (not job or is_same(job, written_by(path))))
    others = sorted(mine, key=_begun)
    for old in others[: max(0, len(others) + 1 - keep)] if keep else ():
        # No longer a checkpoint before it loses its first file.
        gone = folder / f"{_HIDDEN}{old.name}.old"
        old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return final


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON that is there whole or not at all, and on the disk."""
    with files.replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")


def sum_of(value: Any) -> int:
    """Return a checksum of a value of JSON, the same after it was read back."""
    return zlib.crc32(json.dumps(value).encode())


def read_json(path: Path) -> Any:
    """Read a file of JSON.

    Raises:
        ConfigError: it is none.
    """
    return files.read_json(path, f"{path}", _MOST_BYTES)


def hold(folder: Path) -> None:
    """Be the only process that writes checkpoints in a folder, until this one ends.

    Raises:
        ConfigError: another one does.
    """
    with suppress(OSError):  # no room, no right or no locks on this file system: no other job is kept out
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _LOCK
        if path.exists() and _identity(path.stat()) in _held:
            return
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        end = time.monotonic() + _ENDING_S
        while not _locked(file):
            if time.monotonic() > end:
                who = os.read(file, _MOST_NOTED).decode(errors="replace")
                os.close(file)
                raise ConfigError(f"checkpoint folder {folder}: is another job's, {who}; end it, or name another one")
            time.sleep(_PAUSE_S)
        _held[_identity(os.fstat(file))] = file
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} of {socket.gethostname()}".encode())


def release() -> None:
    """Let another process of the job write checkpoints."""
    while _held:
        os.close(_held.popitem()[1])


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _locked(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which forks do not inherit
    except (BlockingIOError, PermissionError):
        return False
    return True


def claim(folder: Path, starters: Collection[str], job: Any = None) -> list[Path]:
    """Take a folder for the job of these `starters`; return the job's checkpoints, the newest first.

    Args:
        job: the facts to record of it.

    Raises:
        ConfigError: another job writes there.
        StorageError: it cannot be written.
    """
    with files.refused(StorageError, f"checkpoint folder {folder}: cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        hold(folder)
        there = {path.name: _written(path) for path in reversed(named(folder))}
        last, before = noted(folder), there
        with suppress(LookupError, TypeError, ValueError):  # of a damaged note
            before = dict(last["before"]) if set(starters) & set(last["starters"]) else there
        note = {"starters": sorted(starters), "before": before, "job": job}
        if {**last, "job": job} != note:  # a restart needs no room for it
            write_json(folder / _JOB, note)
    return [folder / name for name, written in there.items() if before.get(name) != written]


def _written(path: Path) -> int:
    manifest = path / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.exists() else 0  # a damaged one


def noted(folder: Path) -> dict[str, Any]:
    """Return the note of the last job that has taken a folder; {} if there is none."""
    with suppress(ConfigError, TypeError, ValueError):
        note = dict(read_json(folder / _JOB))
        return note | {"job": _facts(note.get("job"))}
    return {}


#: settings that a resumed job takes from the checkpoint, not from the script
_SETTINGS = {"learning_rate": "learning rate", "lr_scheduler": "learning-rate schedule"}


def job_of(actor: WorkerActor) -> dict[str, Any]:
    """Return the facts that a checkpoint keeps of its job. All workers make the same call."""
    shards = actor.shards.values()
    named = [(name, tensor) for shard in shards for name, tensor in shard.state_dict().items()]
    forms = {zlib.crc32(f"{plain_name(name)} {getattr(tensor, 'shape', '')}".encode()) for name, tensor in named}
    every = {form for told in everywhere(actor, "shapes of the model", sorted(forms)) for form in told}
    groups = [group for shard in shards if shard.optimizer is not None for group in shard.optimizer.param_groups]
    rates = (group.get("initial_lr", group.get("lr")) for group in groups)
    rate = next((float(rate) for rate in rates if rate is not None), None)
    schedule = next((_named(shard.updating.training.lr_scheduler) for shard in shards), None)
    about = {"script": Path(sys.argv[0]).name, "model": zlib.crc32(repr(sorted(every)).encode())}
    return {**about, "begun": time.time_ns(), "learning_rate": rate, "lr_scheduler": schedule}


def _named(factory: Any) -> str | None:
    if isinstance(factory, partial):
        given = [*map(repr, factory.args), *(f"{name}={value!r}" for name, value in sorted(factory.keywords.items()))]
        return re.sub(" at 0x[0-9a-f]+", "", f"{_named(factory.func)}({', '.join(given)})")
    return None if factory is None else str(getattr(factory, "__name__", type(factory).__name__))


def differences(job: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    """Return the settings of a script that differ from its checkpoint's job; "" if none does."""
    found = [
        f"{what} {written[name]} in the checkpoint, which counts, and {job[name]} in the script"
        for name, what in _SETTINGS.items()
        if written.get(name) and job.get(name) and written[name] != job[name]
    ]
    if (before := written.get("lr_scheduler")) and not job["lr_scheduler"]:
        found.append(f"learning-rate schedule {before} in the checkpoint, and none in the script: its last rates stay")
    return "; ".join(found)


def last_series(where: Path, job: Mapping[str, Any]) -> list[Path]:
    """Return the checkpoints of the series that `job` has begun last, also damaged ones, the newest first."""
    found = [(path, written_by(path)) for path in reversed(named(where))]
    found = [(path, other) for path, other in found if is_same(job, other)]
    begun = max((other.get("begun", 0) for _, other in found if other is not None), default=0)
    last = noted(where).get("job")
    if last and is_same(job, last) and last.get("begun", 0) > begun:
        return []  # it has written none yet
    return [path for path, other in found if other is None or other.get("begun", 0) == begun]


def others(where: Path) -> str:
    """Return a sentence on the checkpoints in a folder, which another job wrote; "" if there is none."""
    left = complete(where)
    if not left:
        return ""
    found = written_by(left[-1]) or {}
    begun = time.strftime(", begun %Y-%m-%d %H:%M", time.localtime(found["begun"] / 1e9)) if found.get("begun") else ""
    script = found.get("script", "").replace("own_train.py", "rpc-pipe run --model")
    of = f"of {script}{begun}" if script else "that do not say whose they are"
    return f"{len(left)} other checkpoints stay in {where}, the last {left[-1].name} {of}: --resume names one"
