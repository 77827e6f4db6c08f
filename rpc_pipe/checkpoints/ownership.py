"""Whose a folder of checkpoints is: one job writes there at a time, and one that is started again knows its own.

    folder/.lock        held by worker 0 for as long as it runs
           .job.json    who has started the workers, on every host, and which checkpoints were there before

A restart is the same job if one of those who start the workers, our launcher or an agent of torchrun, had started them
before: nobody counts, as agents of one job may have counted differently.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..dependency import ConfigError, StorageError
from .folder import MANIFEST, named, read_json, write_json

_LOCK, _JOB = ".lock", ".job.json"
#: how long a process that is about to end, as one of the attempt before, is waited for
_ENDING_S, _PAUSE_S = 5.0, 0.1
_MOST_NOTED = 300
#: who starts workers does not have this variable, and all below him do
_OF_WORKERS = b"RANK="

#: files that are open while this process runs; a lock would go with the first descriptor of its file that is closed
_held: set[tuple[int, int]] = set()


def starter() -> str:
    """Return what tells the process that starts this job's workers on this host from all others, also later ones."""
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):
        while process > 1 and any(word.startswith(_OF_WORKERS) for word in _environment(process)):
            process = int(_stat(process)[1])  # a shell between the two
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {process} {_stat(process)[19]}"
    return f"{socket.gethostname()} {process}"


def _environment(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")


def _stat(process: int) -> list[str]:
    """Return the fields of proc(5)'s stat from the third, the state, on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def hold(folder: Path) -> None:
    """Be the only process that writes checkpoints in a folder, until this one ends.

    Raises:
        ConfigError: another one does.
    """
    with suppress(OSError):  # no room, no right or no locks on this file system: nobody is kept out
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
                raise ConfigError(
                    f"checkpoint folder {folder}: another job writes there, {who}; end it, or name another folder"
                )
            time.sleep(_PAUSE_S)
        _held.add(_identity(os.fstat(file)))
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} of {socket.gethostname()}".encode())


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _locked(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which forks do not inherit
    except (BlockingIOError, PermissionError):
        return False
    return True


def claim(folder: Path, starters: Collection[str]) -> list[Path]:
    """Take a folder for the job whose workers `starters` have started; return its own checkpoints, the newest first.

    Raises:
        ConfigError: another job writes there.
        StorageError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hold(folder)
        there = {path.name: _written(path) for path in reversed(named(folder))}
        noted = _noted(folder / _JOB)
        before = _before(noted, starters)
        if before is None:
            before = there
        note = {"starters": sorted(starters), "before": before}
        if note != noted:  # a restart needs no room for it
            write_json(folder / _JOB, note)
    except OSError as error:
        raise StorageError(f"checkpoint folder {folder}: cannot be written: {error.strerror}") from error
    return [folder / name for name, written in there.items() if before.get(name) != written]


def _written(path: Path) -> int:
    manifest = path / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.exists() else 0  # a damaged one


def _noted(path: Path) -> Any:
    with suppress(ConfigError):
        return read_json(path)
    return None


def _before(noted: Any, starters: Collection[str]) -> dict[str, Any] | None:
    """Return what was there before this job began; None: it begins."""
    with suppress(LookupError, TypeError, ValueError):
        if set(starters) & set(noted["starters"]):
            return dict(noted["before"])
    return None
