"""The files that a reader names, by size and time, so that one that is written to in a run is refused."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dependency import ConfigError, DataError
from ..system.files import refuse_special, refused

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: bytes of a place that a digest reads, and the number of places in all files: all of 32 MB, and samples of more
_PLACE, _PLACES = 2**16, 512


class DataFile(NamedTuple):
    """A file as it was when it was found."""

    path: Path
    num_bytes: int
    modified_ns: int

    def refuse_changed(self) -> None:
        """Raise DataError if the file is no longer there, or was written to."""
        with refused(DataError, f"file {self.path}: cannot be read"):
            stat = self.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise DataError(f"file {self.path}: was written to after it was found; begin with the new data")

    def numbers(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        """Return `count` numbers from a byte on, as a copy: a mapped file that is truncated would kill the process.

        Raises:
            DataError: the file was written to, or cannot be read.
        """
        self.refuse_changed()
        with refused(DataError, f"file {self.path}: cannot be read"):
            found: NDArray[Any] = np.fromfile(self.path, dtype, count, offset=offset)
        if len(found) < count:
            raise DataError(f"file {self.path}: has become truncated; restore it")
        return found


def find_files(source: Paths, *endings: str) -> list[DataFile]:
    """Return the files of `source` in the given order; the files of a folder are in order of their names.

    Raises:
        ConfigError: there is none, or one is no file.
        DataError: one cannot be read.
    """
    found: list[DataFile] = []
    for root in map(Path, [source] if isinstance(source, (str, os.PathLike)) else source):
        with refused(DataError, f"data {root}: cannot be read"):
            several = (each for each in root.iterdir() if each.suffix.lower() in endings) if root.is_dir() else (root,)
            for path in sorted(several):
                if path.suffix.lower() not in endings:
                    raise ConfigError(f"data {path}: must end in {', '.join(endings)}, which say how it is read")
                refuse_special(path, f"data {path}")
                stat = path.stat()
                found.append(DataFile(path, stat.st_size, stat.st_mtime_ns))
    if not found:
        raise ConfigError(f"data {source}: there are no files that end in {', '.join(endings)}")
    return found


def digest(files: Sequence[DataFile], *more: object) -> str:
    """Return a digest of names, sizes and contents; of more than 32 MB 512 places are read."""
    value = zlib.crc32(repr(more).encode())
    each = max(2, _PLACES // len(files))
    read = {file.path for file in files[:: max(1, each * len(files) // _PLACES)]}
    for path, num_bytes, _ in files:
        value = zlib.crc32(f"{path.name} {num_bytes}\n".encode(), value)
        count, last = min(each, -(-num_bytes // _PLACE)), max(0, num_bytes - _PLACE)
        with refused(DataError, f"file {path}: cannot be read"), path.open("rb") as opened:
            for number in range(count if path in read else 0):
                opened.seek(last * number // max(1, count - 1))
                value = zlib.crc32(opened.read(_PLACE), value)
    return f"{value:08x}"
