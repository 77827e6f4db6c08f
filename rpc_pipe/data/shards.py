"""The files that data are made of: found by name or pattern, here or elsewhere by fsspec, with or without an index.

A folder that `rpc-pipe data pack` wrote has an index with the size and checksum of every shard. The sizes of other
files are taken as they are found.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple, TypeVar

from ..dependency import ConfigError, DataError
from ..system.files import read_file, refused
from .source import need

T = TypeVar("T")
logger = logging.getLogger(__name__)

INDEX = "index.json"
#: most bytes of it
_MOST_INDEX = 2**26
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
#: bytes of a place that an identity reads, and the number of places: all of 32 MB, and samples of a larger file
_PLACE, _PLACES = 2**16, 512

_ATTEMPTS = 4
#: how long the second attempt waits; each further one twice as long
_FIRST_WAIT_S = 0.5
#: how long an HTTP server may be silent
_SILENT_S = 10.0
#: HTTP statuses of client errors that another attempt may cure: too slow, too early, too often
_PASSING = (408, 425, 429)

Roots = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ShardFile(NamedTuple):
    """A file."""

    #: as errors show it: relative to the place that the user named
    name: str
    #: a path of this machine, or a URL
    place: str
    num_bytes: int
    #: CRC-32, where an index has it
    checksum: int | None = None
    #: where an index has it
    num_tokens: int | None = None
    #: when a file of this machine was written to, if it has no checksum
    modified_ns: int | None = None

    @property
    def remote(self) -> bool:
        return is_remote(self.place)


def is_remote(place: str) -> bool:
    """Return whether `place` is a URL, not a path of this machine."""
    return _REMOTE.match(place) is not None and not place.startswith("file://")


def roots_of(source: Roots) -> list[str]:
    """Return the places that the user named, as a list."""
    several = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    return [os.fspath(root).removeprefix("file://") for root in several]


def find_shards(
    source: Roots, endings: Sequence[str], options: Mapping[str, Any] | None = None
) -> tuple[list[ShardFile], dict[str, Any]]:
    """Return the shards of `source`, sorted by name, and the other facts of its index.

    Args:
        source: files, folders, patterns with `*`, or URLs of such; several as a list.
        endings: file endings that count in a folder.
        options: for fsspec, such as credentials.

    Raises:
        ConfigError: there is no shard, or two have the same name.
        DataError: a shard that an index lists is missing or has another size.
    """
    found: list[ShardFile] = []
    index: dict[str, Any] = {}
    for root in roots_of(source):
        try:
            shards, said = _remote(root, endings, options or {}) if is_remote(root) else _local(root, endings)
        except OSError as error:
            raise DataError(f"data {error.filename or root}: cannot be read: {error.strerror}") from error
        found += shards
        index |= said
    if not found:
        named = ", ".join(roots_of(source))
        raise ConfigError(f"data {named}: there are no files that end in {', '.join(endings)}")
    seen: dict[str, ShardFile] = {}
    for shard in found:
        if (other := seen.setdefault(shard.name, shard)) is not shard:
            raise ConfigError(f"data: two shards are called {shard.name} ({other.place} and {shard.place}); rename one")
    return found, index


def _local(root: str, endings: Sequence[str]) -> tuple[list[ShardFile], dict[str, Any]]:
    path = Path(root)
    if "*" in root:
        at = next(i for i, part in enumerate(path.parts) if "*" in part)
        base = str(Path(*path.parts[:at]))
        files = [str(match) for match in Path(base).glob(str(Path(*path.parts[at:]))) if match.is_file()]
    elif not path.exists():
        raise ConfigError(f"data {root}: there is no such file or folder")
    elif not path.is_dir():
        base, files = str(path.parent), [root]
    elif (path / INDEX).is_file():
        shards, index = _indexed(root, read_file(path / INDEX, f"data {root}: its {INDEX}", most=_MOST_INDEX))
        for shard in shards:
            size = Path(shard.place).stat().st_size if Path(shard.place).is_file() else None
            if size != shard.num_bytes:
                has = "is missing" if size is None else f"has {size} bytes"
                raise DataError(f"shard {shard.name}: {has}, but {INDEX} says {shard.num_bytes}: restore the file")
        return shards, index
    else:
        base, files = root, list(_walked(root, tuple(endings)))
    return sorted((_shard(file, base) for file in files), key=lambda shard: shard.name), {}


def _walked(root: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the files below a folder, also through links, unless these lead back to a folder around them."""
    for folder, folders, names in os.walk(root, followlinks=True):
        around = os.path.realpath(folder)
        inner = [name for name in folders if not name.startswith(".")]
        folders[:] = [name for name in inner if not _lies_in(around, os.path.realpath(os.path.join(folder, name)))]
        for name in names:
            if name.lower().endswith(endings) and not name.startswith("."):
                yield os.path.join(folder, name)


def _lies_in(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


def _shard(place: str, base: str) -> ShardFile:
    stat = os.stat(place)
    if not S_ISREG(stat.st_mode):
        raise ConfigError(f"data {place}: must be a file or a folder")
    return ShardFile(os.path.relpath(place, base), place, stat.st_size, modified_ns=stat.st_mtime_ns)


def _remote(root: str, endings: Sequence[str], options: Mapping[str, Any]) -> tuple[list[ShardFile], dict[str, Any]]:
    files, path = file_system(root, f"data {root}", options)
    return patiently(lambda: _listed(files, path, root, endings), f"data {root}: cannot be listed")


def _listed(files: Any, path: str, root: str, endings: Sequence[str]) -> tuple[list[ShardFile], dict[str, Any]]:
    pattern = "*" in root
    if pattern:
        found, base = files.glob(path, detail=True), path.split("*")[0].rsplit("/", 1)[0]
    elif path.lower().endswith(tuple(endings)):
        found, base = {path: files.info(path)}, path.rpartition("/")[0]
    else:
        with suppress(FileNotFoundError):
            return _indexed(root.rstrip("/"), files.cat_file(f"{path.rstrip('/')}/{INDEX}").decode())
        # By default fsspec omits folders that cannot be listed.
        thoroughly = {"on_error": "raise"} if root.startswith("http") else {}
        found, base = files.find(path, detail=True, **thoroughly), path.rstrip("/")
    files_there = sorted(name for name, entry in found.items() if entry.get("type") != "directory")
    places = [name for name in files_there if pattern or name.lower().endswith(tuple(endings))]
    unknown = [place for place in places if found[place].get("size") is None]  # an HTTP server's list has none
    sizes = dict(zip(unknown, files.sizes(unknown), strict=True)) if unknown else {}
    shards = []
    for place in places:
        name, url, size = place.removeprefix(base).lstrip("/"), files.unstrip_protocol(place), found[place].get("size")
        if size is None and (size := sizes[place]) is None:
            raise DataError(f"shard {name}: {url} does not tell its size, by which a whole copy is known")
        shards.append(ShardFile(name, url, int(size)))
    return shards, {}


def _indexed(root: str, text: str) -> tuple[list[ShardFile], dict[str, Any]]:
    """Return the shards that an index lists, and its other facts."""
    try:
        index = json.loads(text)
        listed = [
            ShardFile(name, f"{root}/{name}", int(entry["bytes"]), int(entry["crc32"], 16), int(entry["tokens"]))
            for entry in index.pop("shards")
            for name in [entry["name"]]
        ]
        return listed, {"dtype": str(index["dtype"])}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"data {root}: its {INDEX} cannot be read: {error!r}; pack it again, or remove it") from error


def fingerprint(shards: Sequence[ShardFile], *more: object) -> str:
    """Return a digest of names, sizes and checksums, and of some places in files without a checksum."""
    digest = hashlib.sha256(repr(more).encode())
    for shard in shards:
        digest.update(f"{shard.name}\0{shard.num_bytes}\0{shard.checksum}\n".encode())
    unsure = [shard for shard in shards if shard.checksum is None and not shard.remote]
    each = max(2, _PLACES // max(1, len(unsure)))
    for shard in unsure[:: max(1, each * len(unsure) // _PLACES)]:
        count, last = min(each, -(-shard.num_bytes // _PLACE)), max(0, shard.num_bytes - _PLACE)
        with refused(DataError, f"shard {shard.name}: cannot be read"), open(shard.place, "rb") as file:
            for number in range(count):
                file.seek(last * number // max(1, count - 1))
                digest.update(file.read(_PLACE))
    return digest.hexdigest()[:12]


def file_system(place: str, what: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system that has `place`, and the path there.

    Args:
        what: the feature that needs it, for errors.
        options: for fsspec, such as credentials.

    Raises:
        ConfigError: there is no file system for such a place.
    """
    fsspec = need("fsspec", what)
    options = dict(options)
    if place.startswith("http") and "client_kwargs" not in options:
        aiohttp = need("aiohttp", what)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_S, sock_read=_SILENT_S)
        options["client_kwargs"] = {"timeout": timeout}
    try:
        files, path = fsspec.core.url_to_fs(place, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error
    return files, path


def patiently(do: Callable[[], T], told: str) -> T:
    """Return `do()`; try again if it fails.

    Raises:
        DataError: no attempt succeeded; the message begins with `told`.
        OSError: the local disk is full.
    """
    wait = _FIRST_WAIT_S
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return do()
        except Exception as raised:  # a file system may raise any exception
            # HTTP's file system reports every failure as a missing file.
            cause = raised.__cause__ if isinstance(raised, FileNotFoundError) else None
            error = cause if isinstance(cause, Exception) else raised
            if isinstance(error, ConfigError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            if attempt == _ATTEMPTS or _is_final(error):
                tried = "" if attempt == 1 else f" after {attempt} attempts"
                raise DataError(f"{told}{tried}: {_said(error)}") from error
            logger.warning("%s: attempt %d failed: %s", told, attempt, _said(error))
        time.sleep(wait)
        wait *= 2
    raise AssertionError("the last attempt returns or raises")


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail in the same way."""
    status = getattr(error, "status", None)  # of HTTP
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _PASSING
    return refused or isinstance(error, (FileNotFoundError, PermissionError, NotImplementedError))


def _said(error: Exception) -> str:
    if hasattr(error, "status"):
        return f"{error.status} {getattr(error, 'message', '')}".strip()
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return (str(error) or type(error).__name__).split("\n")[0]
