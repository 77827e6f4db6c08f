"""Shards on this machine: local ones where they lie, others through a cache of limited size, fetched by fsspec.

A shard is copied as a whole to a file of another name, compared with its size and checksum, and renamed, so that a file
in the cache is always complete. Several processes may share a cache: the second process waits for the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..dependency import DataError
from ..system.files import refused, replacing
from .shards import ShardFile, file_system, patiently
from .source import Busy

T = TypeVar("T")

_BLOCK = 2**20


class Storage:
    """Gives local files.

    Args:
        cache: folder for shards from elsewhere; the user's cache folder by default.
        cache_bytes: the most bytes of shards in the folder; None: the free space is the limit.
        options: for fsspec, such as credentials.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rpc-pipe" / "shards"
        self.folder = Path(cache) if cache is not None else usual
        self._limit = cache_bytes
        self.options = options or {}
        #: time of the sources that read from here, by cause
        self.busy = Busy()
        #: how many shards were copied here
        self.fetched = 0

    def local(self, shard: ShardFile) -> Path:
        """Return a complete file with the shard.

        Raises:
            DataError: it is missing, has changed, or cannot be fetched.
        """
        with self._kept(shard) as path:
            return path

    def use(self, shard: ShardFile, read: Callable[[Path], T]) -> T:
        """Return `read` of a complete file with the shard, which stays in the cache meanwhile.

        Raises:
            DataError: as `local`, or as `read`.
        """
        with self._kept(shard) as path:
            with refused(DataError, f"shard {shard.name}: {path} cannot be read"), self.busy.on("disk"):
                return read(path)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Let only one process, and one thread, run the body under `name`."""
        with refused(DataError, f"cache {self.folder}: cannot be made"):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / f".{name}.lock").open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _kept(self, shard: ShardFile) -> Iterator[Path]:
        """Give a complete file with the shard; one of the cache stays there until the end of the body."""
        if not shard.remote:
            yield _unchanged(shard)
            return
        told = f"{shard.place}\0{shard.num_bytes}\0{shard.checksum}"
        path = self.folder / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}-{shard.name.rsplit('/', 1)[-1]}"
        # Where the cache is limited, processes fetch and read one after the other.
        with self.alone(path.name if self._limit is None else "room"):
            unfit = f"shard {shard.name}: {shard.num_bytes} bytes do not fit into the cache {self.folder}"
            with refused(DataError, unfit, "; free some, or name another folder with cache="):
                if path.exists() and path.stat().st_size == shard.num_bytes:
                    os.utime(path)
                else:
                    with self.busy.on("network"):
                        self._make_room(shard)
                        self._fetch(shard, path)
            yield path

    def _make_room(self, shard: ShardFile) -> None:
        """Drop the least recently used shards until the new one fits under the limit and onto the disk.

        Raises:
            DataError: the limit is too low.
        """
        if self._limit is not None and shard.num_bytes > self._limit:
            raise DataError(f"shard {shard.name}: has {shard.num_bytes} bytes of {self._limit} here; raise cache_bytes")
        with os.scandir(self.folder) as entries:
            held = [(entry.stat(), entry.path) for entry in entries if not entry.name.startswith(".")]
        total = shard.num_bytes + sum(stat.st_size for stat, _ in held)
        for stat, path in sorted(held, key=lambda each: each[0].st_mtime_ns):
            fits = self._limit is None or total <= self._limit
            if fits and shutil.disk_usage(self.folder).free > shard.num_bytes:
                return
            Path(path).unlink(missing_ok=True)  # a process with the file open keeps its contents
            total -= stat.st_size

    def _fetch(self, shard: ShardFile, path: Path) -> None:
        files, place = file_system(shard.place, f"shard {shard.name}", self.options)

        def copied() -> None:
            with replacing(path) as partial:
                files.get_file(place, str(partial))
                if (size := partial.stat().st_size) != shard.num_bytes:
                    raise OSError(f"{size} bytes came of {shard.num_bytes}")
                if shard.checksum is not None and checksum(partial) != shard.checksum:
                    raise OSError("its checksum differs from the index")

        patiently(copied, f"shard {shard.name}: cannot be fetched from {shard.place}")
        self.fetched += 1

    def look(self, shard: ShardFile, read: Callable[[BinaryIO], T]) -> T:
        """Return `read` of a shard that is open for reading at random places.

        One from elsewhere is not copied as a whole.

        Raises:
            DataError: it cannot be read, or as `read`.
        """
        told = f"shard {shard.name}: {shard.place} cannot be read"
        if not shard.remote:
            with refused(DataError, told), self.local(shard).open("rb") as file:
                return read(file)
        files, path = file_system(shard.place, f"shard {shard.name}", self.options)

        def looked() -> T:
            with files.open(path, "rb") as file:
                return read(file)

        return patiently(looked, told)


def _unchanged(shard: ShardFile) -> Path:
    """Return the file of a shard of this machine, if it is as it was when it was listed."""
    path = Path(shard.place)
    with refused(DataError, f"shard {shard.name}: {path} cannot be read"):
        stat = path.stat()
    if stat.st_size != shard.num_bytes or shard.modified_ns not in (None, stat.st_mtime_ns):
        raise DataError(f"shard {shard.name}: {path} was written to after it was listed; begin with the new data")
    return path


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
