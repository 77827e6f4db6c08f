"""Shards on this machine: local ones where they lie, others through a cache of limited size.

A shard is copied as a whole to a file of another name, compared with its size and checksum, and renamed, so that a file
in the cache is always complete. Several processes may share a cache: whoever comes second waits for the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from ..dependency import DataError
from .elsewhere import copy, file_system, has_no_room, patiently
from .shards import ShardFile
from .source import Busy

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: how often a shard is fetched that others take out of the cache
_ATTEMPTS = 4
_BLOCK = 2**20
_PARTIAL, _FORGOTTEN_S = ".partial", 3600.0
#: how long another process is waited for that fetches or makes the same, and after how long that is told
_OTHERS_S, _TOLD_S = 6 * 3600.0, 10.0


class Storage:
    """Gives local files.

    Args:
        cache: folder for shards from elsewhere; the user's cache folder by default.
        cache_bytes: how many bytes of shards the folder may hold; None: as many as fit.
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
        self._lock = threading.Lock()
        #: cached files by how soon they are needed
        self._rank: dict[str, int] = {}
        #: those that are being opened here, once for each time
        self._opening: Counter[str] = Counter()
        #: how many shards were copied here
        self.fetched = 0

    def upcoming(self, shards: Sequence[ShardFile]) -> None:
        """Know which shards are needed next, in this order."""
        with self._lock:
            self._rank = {self._name(shard): number for number, shard in enumerate(shards) if shard.remote}

    def local(self, shard: ShardFile, busy: Busy) -> Path:
        """Return a complete file with the shard.

        Raises:
            DataError: it is missing, has another size, or cannot be fetched.
        """
        if shard.remote:
            return self._fetched(shard, busy)
        path = Path(shard.place)
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"shard {shard.name}: {path} cannot be read: {error.strerror}") from error
        if stat.st_size != shard.num_bytes:
            raise DataError(
                f"shard {shard.name}: {path} has {stat.st_size} bytes, but had {shard.num_bytes} when it was listed"
            )
        if shard.modified_ns not in (None, stat.st_mtime_ns):
            raise DataError(f"shard {shard.name}: {path} was written to after it was listed; begin with the new data")
        return path

    def use(self, shard: ShardFile, busy: Busy, read: Callable[[Path], T]) -> T:
        """Return what `read` makes of a complete file with the shard.

        Whoever makes room in the cache may take the file away before it is open; then it is fetched again.

        Raises:
            DataError: as `local`, or as `read`.
        """
        if not shard.remote:
            return read(self.local(shard, busy))
        with self._opened(self._name(shard)):
            for _ in range(_ATTEMPTS):
                path = self.local(shard, busy)
                try:
                    return read(path)
                except Exception:
                    if path.exists():
                        raise
        raise DataError(f"shard {shard.name}: others take it out of the cache {self.folder} as soon as it is there")

    @contextmanager
    def _opened(self, name: str) -> Iterator[None]:
        with self._lock:
            self._opening[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._opening[name] -= 1
                self._opening += Counter()  # without those that nobody opens

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Be the only process that does in the body what `name` says."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"the cache {self.folder}: cannot be made: {error.strerror}") from error
        with _locked(self.folder / f".{name}.lock"):
            yield

    def _name(self, shard: ShardFile) -> str:
        told = f"{shard.place}\0{shard.num_bytes}\0{shard.checksum}"
        return f"{hashlib.sha256(told.encode()).hexdigest()[:16]}-{shard.name.rsplit('/', 1)[-1]}"

    def _fetched(self, shard: ShardFile, busy: Busy) -> Path:
        path = self.folder / self._name(shard)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_name(f".{path.name}.lock")):
                if path.exists() and path.stat().st_size == shard.num_bytes:
                    os.utime(path)
                else:
                    with busy.on("network"), self._room(shard):
                        self._fetch(shard, path)
        except OSError as error:
            raise self._no_room(shard, error) from error
        return path

    def _no_room(self, shard: ShardFile, error: OSError) -> DataError:
        if has_no_room(error):
            return DataError(
                f"shard {shard.name}: {shard.num_bytes} bytes do not fit into the cache {self.folder}: "
                f"{error.strerror}; free some, or name another folder with cache="
            )
        return DataError(f"shard {shard.name}: the cache {self.folder} cannot be written: {error}")

    @contextmanager
    def _room(self, shard: ShardFile) -> Iterator[None]:
        """Have room for the shard in the body. Where the cache is limited, processes fetch one after the other."""
        with _locked(self.folder / ".room.lock"):
            self._make_room(shard)
            if self._limit is not None:
                yield
        if self._limit is None:
            yield

    def _make_room(self, shard: ShardFile) -> None:
        """Drop what is needed last until the shard fits under the limit and onto the disk.

        Raises:
            DataError: the limit is too low.
        """
        if self._limit is not None and shard.num_bytes > self._limit:
            raise DataError(
                f"shard {shard.name}: has {shard.num_bytes} bytes, and the cache {self.folder} is limited to "
                f"{self._limit}; raise cache_bytes"
            )
        held = self._held()
        total = shard.num_bytes + sum(size for _, size, _ in held)
        with self._lock:
            rank, opening = dict(self._rank), set(self._opening)
        # What nobody here needs goes first, the longest unused before others; then what is needed last, but what is
        # just being opened only if nothing else is left.
        held.sort(key=lambda entry: (entry[0].name in opening, -rank.get(entry[0].name, len(rank) + 1), entry[2]))
        for path, size, _ in held:
            fits = self._limit is None or total <= self._limit
            if fits and shutil.disk_usage(self.folder).free > shard.num_bytes:
                return
            path.unlink(missing_ok=True)  # who has mapped it keeps it
            total -= size

    def _held(self) -> list[tuple[Path, int, float]]:
        """Return the shards in the cache, each with size and time of use."""
        found = []
        for path in self.folder.iterdir():
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process made room
                continue
            if not path.name.startswith("."):
                found.append((path, stat.st_size, stat.st_mtime))
            elif path.name.endswith(_PARTIAL) and time.time() - stat.st_mtime > _FORGOTTEN_S:
                path.unlink(missing_ok=True)  # of a process that was killed
        return found

    def _fetch(self, shard: ShardFile, path: Path) -> None:
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}{_PARTIAL}")

        def copied() -> None:
            try:
                self._copy(shard, partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

        patiently(copied, f"shard {shard.name}: cannot be fetched from {shard.place}")
        self.fetched += 1

    def _copy(self, shard: ShardFile, partial: Path) -> None:
        copy(*self._files(shard), str(partial), shard.num_bytes)
        size = partial.stat().st_size
        if size != shard.num_bytes:
            raise OSError(f"{size} bytes came of {shard.num_bytes}")
        if shard.checksum is not None and checksum(partial) != shard.checksum:
            raise OSError("its checksum differs from the index")

    def look(self, shard: ShardFile, read: Callable[[BinaryIO], T]) -> T:
        """Return what `read` makes of a shard that is open for reading here and there.

        One from elsewhere is not copied as a whole.

        Raises:
            DataError: it cannot be read, or as `read`.
        """

        def looked() -> T:
            if shard.remote:
                files, path = self._files(shard)
                with files.open(path, "rb") as file:
                    return read(file)
            with self.local(shard, Busy()).open("rb") as file:
                return read(file)

        told = f"shard {shard.name}: {shard.place} cannot be read"
        try:
            return patiently(looked, told) if shard.remote else looked()
        except OSError as error:
            raise DataError(f"{told}: {error.strerror or error}") from error

    def _files(self, shard: ShardFile) -> tuple[Any, str]:
        return file_system(shard.place, f"shard {shard.name}", self.options)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the only process in the body; a process that ends lets go.

    Raises:
        DataError: another holds on to it.
    """
    begin, told = time.monotonic(), False
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = time.monotonic() - begin
                if waited > _OTHERS_S:
                    raise DataError(f"{path}: another process has held this for {waited:.0f} s; end it") from None
                if waited > _TOLD_S and not told:
                    told = True
                    logger.warning("waiting for another process that holds %s", path)
                time.sleep(min(0.1, 0.002 + waited / 10))
                continue
            if not _is_still(path, file):  # whoever had it has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_still(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
