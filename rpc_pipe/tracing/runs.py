"""The runs on this machine, found by script, folder or process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..dependency import ConfigError
from . import run_folders
from .board_reader import Board


def board_files(path: Path) -> dict[int, Path]:
    """Return the files of boards in a run's folder, by worker."""
    return {int(file.name[7:]): file for file in sorted(path.glob("worker-*")) if file.name[7:].isdecimal()}


def boards(path: Path) -> dict[int, Board]:
    """Return the boards in a run's folder, by worker."""
    found = {}
    for worker, file in sorted(board_files(path).items()):
        with suppress(OSError, ValueError):  # just removed, or of another version
            found[worker] = Board(file)
    return found


def running() -> Iterator[Path]:
    """Yield the folders of the runs on this machine, the newest first."""
    for path in sorted(run_folders.root().iterdir(), key=lambda path: -path.stat().st_mtime):
        if not path.name.startswith(run_folders.SOCKETS) and any(map(run_folders.alive, run_folders.processes(path))):
            yield path


def find(address: str | None) -> Path:
    """Return the folder of the run that `address` names: its script, folder or a process id; None: the only run.

    Raises:
        ConfigError: no run, or several, have this name.
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
        numbers = {process.partition("/")[0] for process in run_folders.processes(path)}
        if address in numbers or address == path.name or Path(address) == path:
            return path
    named = [
        path for path in there if Path(address).name in {board.header.get("script") for board in boards(path).values()}
    ]
    if len(named) == 1:
        return named[0]
    if named:
        raise ConfigError(
            f"watch {address}: {len(named)} runs of it are going on; name one of {', '.join(map(_shown, named))}"
        )
    known = f"running are {', '.join(map(_shown, there))}" if there else "none is running on this machine"
    raise ConfigError(f"watch {address}: there is no such run; {known}")


def _shown(path: Path) -> str:
    headers = [board.header for board in boards(path).values()]
    if not headers:
        return f"{path.name} (starting)"
    first = headers[0]
    since = time.strftime("%H:%M:%S", time.localtime(first["started"]))
    return f"{path.name} ({first.get('script', '')} since {since}, {first['schedule']} on {len(headers)} workers)"
