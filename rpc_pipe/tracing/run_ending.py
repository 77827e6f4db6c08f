"""How a run ended, for its watchers: a file of lines beside the boards. Loads without torch.

The process that ends a run writes the cause and then removes the file with its folder. A watcher opens the file at its
first poll, so it can read the last lines even after the removal.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: the file's name in a run's folder
END = "end"
#: longer causes are cut off
_MOST_TEXT, _MOST_READ = 8_000, 2**20
RUN_FAILED, RUN_STOPPED = "failed", "was stopped"


class Ending(NamedTuple):
    """How a run, or a worker of it, ended."""

    #: RUN_FAILED or RUN_STOPPED
    what: str
    #: why
    text: str
    #: whether the end of another worker has caused it
    consequence: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


def tell_end(folder: Path, ending: Ending) -> None:
    """Tell watchers, if possible."""
    line = json.dumps(ending._replace(text=ending.text[:_MOST_TEXT]))
    with suppress(OSError), (folder / END).open("a") as file:
        file.write(line + "\n")  # in one piece, as other workers may write too


class EndReader:
    """Reads how the run in a folder ended, even after the folder was removed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / END
        self._file: int | None = None
        self._inode = -1

    def read(self) -> Ending | None:
        """Return the first cause, None if there is none yet."""
        self._open()
        if self._file is None:
            return None
        told = []
        for line in os.pread(self._file, _MOST_READ, 0).splitlines():
            with suppress(ValueError, TypeError):  # written in part
                told.append(Ending(*json.loads(line)))
        return min(told, key=lambda ending: ending.consequence, default=None)

    def _open(self) -> None:
        """Open the file, or the new one of restarted workers."""
        with suppress(OSError):
            if self._file is not None and self._path.exists() and self._path.stat().st_ino == self._inode:
                return
            new = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.close()
            self._file, self._inode = new, os.fstat(new).st_ino

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __del__(self) -> None:
        self.close()
