"""Checkpoints in a folder: how they are called, which is the newest, and that one is there whole or not at all.

    folder/step-00000120/manifest.json                       what the others are, and their sizes
                         model.safetensors.index.json        as Hugging Face's: which file has which tensor
                         model-00001-of-00004.safetensors    of worker 0, and so on
                         optimizer-00001-of-00004.safetensors

While it is written a checkpoint has a name that begins with a dot. It gets its own by one rename, after everything
in it has reached the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..dependency import StorageError
from ..system import files

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
#: of checkpoints that are being written
_HIDDEN = ".step-"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


def named(folder: Path) -> list[Path]:
    """Return what is called a checkpoint in `folder`, also what has been damaged since, the oldest first."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, the oldest first."""
    return [path for path in named(folder) if (path / MANIFEST).is_file()]


def newest(path: Path) -> Path | None:
    """Return `path`, if it is a checkpoint, or else the newest complete one in it; None: there is none."""
    if (path / MANIFEST).is_file():
        return path
    found = complete(path)
    return found[-1] if found else None


def name(step: int) -> str:
    """Return what a checkpoint after so many steps is called."""
    return f"step-{step:08}"


def begin(folder: Path, step: int) -> Path:
    """Make the place where a checkpoint is written; remove what killed jobs have left half-written.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_HIDDEN}*"):
            shutil.rmtree(left, ignore_errors=True)
        place = Path(tempfile.mkdtemp(prefix=f"{_HIDDEN}{step:08}.", dir=folder))
        place.chmod(0o777 & ~umask())
    except OSError as error:
        raise StorageError(f"checkpoint folder {folder}: cannot be written: {error.strerror}") from error
    return place


def empty(place: Path) -> None:
    """Remove what has been written of a checkpoint that fails; a worker that is slower may yet look for its place."""
    with suppress(OSError):
        for path in place.iterdir():
            path.unlink(missing_ok=True)


def umask() -> int:
    """Return which rights new files do not have."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def commit(place: Path, step: int, keep: int | None) -> Path:
    """Give a checkpoint all of whose files are there its name; remove all but this one and the newest of others.

    The others may be of a run that came further and has been left behind: this one is the newest, whatever its step.

    Args:
        keep: how many stay, this one included; None: all.
    """
    sync(place)
    folder, final = place.parent, place.parent / name(step)
    count = 0
    while final.exists():  # the same step was saved before: what is there stays until this is
        count += 1
        final = folder / f"{name(step)}.{count}"
    place.rename(final)
    sync(folder)
    others = [path for path in complete(folder) if path != final]
    for old in others[: max(0, len(others) + 1 - keep)] if keep else ():
        # No longer a checkpoint before it loses its first file.
        gone = folder / f"{_HIDDEN}{old.name}.old"
        old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return final


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON that is there whole or not at all, and on the disk."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    sync(temporary)
    temporary.replace(path)


def sum_of(value: Any) -> int:
    """Return a number that tells a value of JSON, also after it was read back, from one of which a bit has changed."""
    return zlib.crc32(json.dumps(value).encode())


def read_json(path: Path) -> Any:
    """Read a file of JSON.

    Raises:
        ConfigError: it is none.
    """
    return files.read_json(path, f"{path}")
