"""Log files of what workers print, one for each, kept if the run fails. Loads without torch."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

#: environment variable: folder of all logs; `off`: no logs
FOLDER = "RPC_PIPE_LOGS"
#: most bytes of a log; the rest is only shown
_MOST_BYTES = 2**26
#: number of failed runs whose logs are kept
_KEPT = 10


def log_root() -> Path | None:
    """Return the folder of this user's logs, in the user's state folder (XDG Base Directory Specification)."""
    given = os.environ.get(FOLDER)
    if given == "off":
        return None
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rpc-pipe" / "logs"


class Logs:
    """The logs of a run. If they cannot be written, they are omitted."""

    def __init__(self, num_workers: int) -> None:
        self.folder: Path | None = None
        self._files: list[BinaryIO] = []
        with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home folder
            root = log_root()
            if root is None:
                return
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _prune(root)
            folder = root / f"run-{os.getpid()}"
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this id
            folder.mkdir(mode=0o700)
            self._files = [(folder / f"worker-{worker}.log").open("wb", buffering=0) for worker in range(num_workers)]
            self.folder = folder

    def write(self, worker: int, data: bytes) -> None:
        """Append what a worker has printed."""
        with suppress(OSError, IndexError, ValueError):  # a full disk does not end training; it may be closed
            file = self._files[worker]
            if (left := _MOST_BYTES - file.tell()) > 0:
                file.write(data[:left])
                if len(data) >= left:
                    file.write(b"\n[no more is kept]\n")

    def close(self, keep: bool) -> None:
        """Close the logs, and keep or remove them."""
        for file in self._files:
            file.close()
        self._files = []
        if self.folder is not None and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                self.folder.parent.rmdir()


def _prune(root: Path) -> None:
    runs = sorted(root.glob("run-*"), key=lambda path: path.stat().st_mtime)
    for path in runs[: -_KEPT + 1]:
        if not Path("/proc", path.name.removeprefix("run-")).exists():
            shutil.rmtree(path, ignore_errors=True)
