"""Where the boards of the runs on this machine are: a folder of the user's, in memory, with a folder for each run."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from .board import Board

#: environment variable: this run's folder; `off`: keep no boards
FOLDER = "RPC_PIPE_BOARDS"
_OFF = "off"
#: an empty folder may be of a run that is just starting
_YOUNG_S = 600


def root() -> Path:
    """Return the folder of all runs of this user; nobody else can read it.

    Raises:
        ConfigError: it belongs to somebody else.
    """
    memory = Path("/dev/shm")
    above = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    path = above / f"rpc-pipe-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(f"{path}: must be a folder that only you can read; remove it")
    return path


def folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the run that this process belongs to, made if there is none; None if it keeps no boards."""
    given = environ.get(FOLDER)
    if given == _OFF:
        return None
    if given:
        return Path(given)
    sweep()
    if "MASTER_PORT" in environ and "RANK" in environ:  # torchrun: the workers of a machine agree on a name
        run = re.sub(r"[^\w.-]", "_", environ.get("TORCHELASTIC_RUN_ID", "run"))
        # With the host's name, as containers may share memory but not clocks or processes.
        name = f"torchrun-{run}-{environ['MASTER_PORT']}-{socket.gethostname()}"
    else:
        name = f"run-{os.getpid()}"
    path = root() / name
    path.mkdir(exist_ok=True)
    return path


def sweep() -> None:
    """Remove what runs that were killed have left."""
    for path in root().iterdir():
        headers = [board.header for board in boards(path).values()]
        processes = {header["pid"] for header in headers} | launcher_of(path)
        if not processes and time.time() < path.stat().st_mtime + _YOUNG_S:
            continue
        if not any(map(alive, processes)):
            shutil.rmtree(path, ignore_errors=True)


def launcher_of(path: Path) -> set[int]:
    """Return the launcher's process, if the run in the folder `path` has one."""
    try:
        return {int((path / "launcher").read_text())}
    except (OSError, ValueError):
        return set()


def alive(process: int) -> bool:
    """Tell whether a process of this machine runs."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def boards(path: Path) -> dict[int, Board]:
    """Return the boards in a run's folder, by worker."""
    found = {}
    for file in path.glob("worker-*"):
        if file.name[7:].isdigit():
            try:
                found[int(file.name[7:])] = Board(file)
            except (OSError, ValueError):  # just removed
                continue
    return dict(sorted(found.items()))


def programs(path: Path) -> dict[int, dict[str, Any]]:
    """Return the programs that workers have written, as `plan.spec_of_programs` takes them."""
    found = {}
    for file in path.glob("plan-*"):
        if file.name[5:].isdigit():
            try:
                found[int(file.name[5:])] = json.loads(file.read_text())
            except (OSError, ValueError):
                continue
    return dict(sorted(found.items()))


def running() -> Iterator[Path]:
    """Yield the folders of the runs on this machine, the latest first."""
    paths = sorted(root().iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        if any(alive(board.header["pid"]) for board in boards(path).values()):
            yield path


def find(address: str | None) -> Path:
    """Return the folder of the run that `address` names: a folder, a process of the run, or the only one there is.

    Raises:
        ConfigError: there is none, or there are several.
    """
    there = list(running())
    if address is None:
        if not there:
            raise ConfigError(
                "watch: no run found on this machine; start one with rpc-pipe run, or name a recording: "
                "rpc-pipe watch run.jsonl"
            )
        if len(there) > 1:
            raise ConfigError(f"watch: {len(there)} runs are going on; name one of {', '.join(map(_shown, there))}")
        return there[0]
    for path in there:
        processes = {str(board.header["pid"]) for board in boards(path).values()} | set(map(str, launcher_of(path)))
        if address in processes or address == path.name or Path(address) == path:
            return path
    known = f"running are {', '.join(map(_shown, there))}" if there else "none is running on this machine"
    raise ConfigError(f"watch {address}: there is no such run; {known}")


def _shown(path: Path) -> str:
    headers = [board.header for board in boards(path).values()]
    return f"{path.name} ({headers[0].get('schedule', '?')} on {len(headers)} workers)" if headers else path.name
