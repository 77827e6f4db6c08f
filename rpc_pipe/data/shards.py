"""The files that data are made of: found by name or pattern, here or elsewhere, with or without an index.

A folder that `rpc-pipe data pack` wrote has an index with the size and checksum of every shard; of others the sizes are
taken as they are found.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from ..dependency import ConfigError, DataError
from ..dependency.files import DAMAGED, read_file
from .elsewhere import file_system, patiently

INDEX = "index.json"
#: no index is larger
MOST_INDEX = 2**26
#: types of tokens that an index may name
_DTYPES = "uint8", "uint16", "uint32"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
#: bytes of a place that an identity looks at, and how many places: all of 32 MB, and something of what is more
_PLACE, _PLACES = 2**16, 512

Roots = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ShardFile(NamedTuple):
    """A file."""

    #: as errors show it: relative to what the user named
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
    """Tell whether `place` is a URL, not a path of this machine."""
    return _REMOTE.match(place) is not None and not place.startswith("file://")


def roots_of(source: Roots) -> list[str]:
    """Return what the user named, as a list."""
    several = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    return [os.fspath(root).removeprefix("file://") for root in several]


def find_shards(
    source: Roots, endings: Sequence[str], options: Mapping[str, Any] | None = None
) -> tuple[list[ShardFile], dict[str, Any]]:
    """Return the shards of `source`, sorted by name, and what its index says besides.

    Args:
        source: files, folders, patterns with `*`, or URLs of such; several as a list.
        endings: of the files of a folder that count.
        options: for fsspec, such as credentials.

    Raises:
        ConfigError: there is none, or two have the same name.
        DataError: one that an index lists is missing or has another size.
    """
    found: list[ShardFile] = []
    index: dict[str, Any] = {}
    for root in roots_of(source):
        shards, said = _remote(root, endings, options or {}) if is_remote(root) else _local(root, endings)
        found += shards
        index |= said
    if not found:
        named = ", ".join(roots_of(source))
        raise ConfigError(f"data {named}: there are no files that end in {', '.join(endings)}")
    _refuse_twins(found)
    return found, index


def _refuse_twins(shards: Iterable[ShardFile]) -> None:
    seen: dict[str, ShardFile] = {}
    for shard in shards:
        other = seen.setdefault(shard.name, shard)
        if other is not shard:
            raise ConfigError(
                f"data: two shards are called {shard.name} ({other.place} and {shard.place}); "
                "rename one, or name the folder above both"
            )


def _local(root: str, endings: Sequence[str]) -> tuple[list[ShardFile], dict[str, Any]]:
    path = Path(root)
    if "*" in root:
        at = next(i for i, part in enumerate(path.parts) if "*" in part)
        base = Path(*path.parts[:at]) if at else Path()
        matching = sorted(base.glob(str(Path(*path.parts[at:]))))
        for match in matching:
            if match.is_dir() and match.name.lower().endswith(tuple(endings)):
                _refuse_folder(str(match), tuple(endings))
        return [_shard(file, base) for file in matching if file.is_file()], {}
    if not path.exists():
        raise ConfigError(f"data {root}: there is no such file or folder")
    if path.is_file():
        return [_shard(path, path.parent)], {}
    if not path.is_dir():
        raise ConfigError(f"data {root}: is {_kind_of(path)}; must be a file or a folder")
    if (path / INDEX).is_file():
        text = read_file(path / INDEX, f"data {root}: its {INDEX}", MOST_INDEX)
        return _indexed(root, text, lambda name: _size(path / name))
    return sorted(_walked(root, root, tuple(endings)), key=lambda shard: shard.name), {}


def _walked(
    root: str, folder: str, endings: tuple[str, ...], within: frozenset[str] = frozenset()
) -> Iterator[ShardFile]:
    """Yield the files below a folder; a set may have a million, so no `Path` is made of them."""
    name = folder
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = entry.path
                if entry.is_dir():
                    inside = within
                    if entry.is_symlink():  # which may lead back to a folder around it
                        inside = within | {os.path.realpath(folder)}
                        if any(_lies_in(around, os.path.realpath(entry.path)) for around in inside):
                            continue
                    if entry.name.lower().endswith(endings):
                        _refuse_folder(entry.path, endings)
                    yield from _walked(root, entry.path, endings, inside)
                elif entry.name.lower().endswith(endings):
                    stat = entry.stat()
                    if not S_ISREG(stat.st_mode):
                        raise DataError(f"shard {name}: is {_kind_of(Path(name))}; must be a file")
                    yield ShardFile(name[len(root) :].lstrip("/"), name, stat.st_size, modified_ns=stat.st_mtime_ns)
    except OSError as error:
        raise DataError(f"data {name}: cannot be read: {error.strerror}") from error


def _refuse_folder(folder: str, endings: tuple[str, ...]) -> None:
    """Refuse a folder that is called like a shard, unless it has shards, as one that Spark calls `data.parquet`.

    Raises:
        DataError: it has none.
    """
    if not any(name.lower().endswith(endings) for _, _, names in os.walk(folder) for name in names):
        raise DataError(f"shard {folder}: is a folder without files that end in {', '.join(endings)}; must be a file")


def _lies_in(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


def _kind_of(path: Path) -> str:
    if path.is_fifo():
        return "a FIFO"
    return "a socket" if path.is_socket() else "a device"


def _shard(path: Path, base: Path) -> ShardFile:
    try:
        stat = path.stat()
        return ShardFile(path.relative_to(base).as_posix(), str(path), stat.st_size, modified_ns=stat.st_mtime_ns)
    except OSError as error:
        raise DataError(f"shard {path}: cannot be read: {error.strerror}") from error


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _remote(root: str, endings: Sequence[str], options: Mapping[str, Any]) -> tuple[list[ShardFile], dict[str, Any]]:
    files, path = file_system(root, f"data {root}", options)
    try:
        return patiently(lambda: _listed(files, path, root, endings), f"data {root}: cannot be listed")
    except OSError as error:
        raise DataError(f"data {root}: cannot be listed: {error.strerror}") from error


def _listed(files: Any, path: str, root: str, endings: Sequence[str]) -> tuple[list[ShardFile], dict[str, Any]]:
    scheme, pattern = root.partition("://")[0], "*" in root

    def url(found: str) -> str:
        return found if is_remote(found) else f"{scheme}://{found.lstrip('/') if scheme != 'memory' else found}"

    if pattern:
        found, base = files.glob(path, detail=True), path.split("*")[0].rsplit("/", 1)[0]
    elif path.lower().endswith(tuple(endings)):
        found, base = {path: files.info(path)}, path.rpartition("/")[0]
    else:
        with suppress(FileNotFoundError):
            text = files.cat_file(f"{path.rstrip('/')}/{INDEX}").decode()
            return _indexed(root.rstrip("/"), text, lambda name: None, remote=True)
        # By itself it leaves out what cannot be listed.
        thoroughly = {"on_error": "raise"} if scheme.startswith("http") else {}
        found, base = files.find(path, detail=True, **thoroughly), path.rstrip("/")
    places = [
        name
        for name, entry in sorted(found.items())
        if entry.get("type") != "directory" and (pattern or name.lower().endswith(tuple(endings)))
    ]
    unknown = [place for place in places if found[place].get("size") is None]  # an HTTP server's list has none
    sizes = dict(zip(unknown, files.sizes(unknown), strict=True)) if unknown else {}
    shards = []
    for place in places:
        name, size = place.removeprefix(base).lstrip("/"), found[place].get("size") or sizes.get(place)
        if size is None and place in sizes:
            raise DataError(f"shard {name}: {url(place)} does not tell its size, by which a whole copy is known")
        shards.append(ShardFile(name, url(place), int(size or 0)))
    return shards, {}


def _indexed(
    root: str, text: str, size_of: Callable[[str], int | None], remote: bool = False
) -> tuple[list[ShardFile], dict[str, Any]]:
    """Return the shards that an index lists; those of this machine must be there, whole."""
    try:
        index = json.loads(text)
        listed = [
            ShardFile(
                entry["name"], f"{root}/{entry['name']}", int(entry["bytes"]), int(entry["crc32"], 16), entry["tokens"]
            )
            for entry in index.pop("shards")
        ]
        if index.get("dtype") not in _DTYPES or not all(_is_possible(shard) for shard in listed):
            raise ValueError("names, sizes or dtype cannot be")
    except DAMAGED as error:
        raise DataError(f"data {root}: its {INDEX} cannot be read: {error!r}; pack it again, or remove it") from error
    _refuse_twins(listed)
    for shard in () if remote else listed:
        size = size_of(shard.name)
        if size is None:
            raise DataError(f"shard {shard.name}: is missing in {root}, but {INDEX} lists it; restore it")
        if size != shard.num_bytes:
            raise DataError(
                f"shard {shard.name}: has {size} bytes, but {INDEX} says {shard.num_bytes}: "
                f"it is {'truncated' if size < shard.num_bytes else 'not the one that was packed'}; "
                "restore the whole file"
            )
    return listed, index


def _is_possible(shard: ShardFile) -> bool:
    """Tell whether an index may say so of a shard: a file of the folder with whole numbers of bytes and tokens."""
    count = shard.num_tokens
    named = isinstance(shard.name, str) and shard.name not in ("", ".", "..") and "/" not in shard.name
    return named and shard.num_bytes >= 0 and isinstance(count, int) and 0 <= count <= shard.num_bytes


def fingerprint(shards: Sequence[ShardFile], *more: object) -> str:
    """Return a digest of names, sizes and checksums, and of what some places of files without a checksum hold."""
    digest = hashlib.sha256(repr(more).encode())
    for shard in shards:
        digest.update(f"{shard.name}\0{shard.num_bytes}\0{shard.checksum}\n".encode())
    unsure = [shard for shard in shards if shard.checksum is None and not shard.remote]
    each = max(2, _PLACES // max(1, len(unsure)))
    for shard in unsure[:: max(1, each * len(unsure) // _PLACES)]:
        count, last = min(each, -(-shard.num_bytes // _PLACE)), max(0, shard.num_bytes - _PLACE)
        try:
            with open(shard.place, "rb") as file:
                for number in range(count):
                    file.seek(last * number // max(1, count - 1))
                    digest.update(file.read(_PLACE))
        except OSError as error:
            raise DataError(f"shard {shard.name}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:12]
