"""The files that data are made of: found by name or pattern, here or elsewhere, with or without an index.

A folder that `rpc-pipe data pack` wrote has an index with the size and checksum of every shard; of others the sizes are
taken as they are found.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dependency import ConfigError, DataError
from .source import need

INDEX = "index.json"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
#: bytes at both ends of a local file, and files, that an identity looks at
_ENDS, _LOOKED_AT = 4096, 32

Roots = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Shard:
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


def find_shards(source: Roots, endings: Sequence[str]) -> tuple[list[Shard], dict[str, Any]]:
    """Return the shards of `source`, sorted by name, and what its index says besides.

    Args:
        source: files, folders, patterns with `*`, or URLs of such; several as a list.
        endings: of the files of a folder that count.

    Raises:
        ConfigError: there is none, or two have the same name.
        DataError: one that an index lists is missing or has another size.
    """
    found: list[Shard] = []
    index: dict[str, Any] = {}
    for root in roots_of(source):
        shards, said = (_remote if is_remote(root) else _local)(root, endings)
        found += shards
        index |= said
    if not found:
        named = ", ".join(roots_of(source))
        raise ConfigError(f"data {named}: there are no files that end in {', '.join(endings)}")
    _refuse_twins(found)
    return found, index


def _refuse_twins(shards: Iterable[Shard]) -> None:
    seen: dict[str, Shard] = {}
    for shard in shards:
        other = seen.setdefault(shard.name, shard)
        if other is not shard:
            raise ConfigError(
                f"data: two shards are called {shard.name} ({other.place} and {shard.place}); "
                "rename one, or name the folder above both"
            )


def _local(root: str, endings: Sequence[str]) -> tuple[list[Shard], dict[str, Any]]:
    path = Path(root)
    if "*" in root:
        at = next(i for i, part in enumerate(path.parts) if "*" in part)
        base = Path(*path.parts[:at]) if at else Path()
        files = sorted(p for p in base.glob(str(Path(*path.parts[at:]))) if p.is_file())
        return [_shard(file, base) for file in files], {}
    if not path.exists():
        raise ConfigError(f"data {root}: there is no such file or folder")
    if path.is_file():
        return [_shard(path, path.parent)], {}
    if (path / INDEX).is_file():
        return _indexed(root, (path / INDEX).read_text(), lambda name: _size(path / name))
    return sorted(_walked(root, root, tuple(endings)), key=lambda shard: shard.name), {}


def _walked(root: str, folder: str, endings: tuple[str, ...]) -> Iterator[Shard]:
    """Yield the files below a folder; a set may have a million, so no `Path` is made of them."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    yield from _walked(root, entry.path, endings)
                elif entry.name.endswith(endings):
                    name = entry.path[len(root) :].lstrip("/")
                    yield Shard(name, entry.path, entry.stat().st_size)
    except OSError as error:
        raise DataError(f"data {folder}: cannot be read: {error.strerror}") from error


def _shard(path: Path, base: Path) -> Shard:
    try:
        return Shard(path.relative_to(base).as_posix(), str(path), path.stat().st_size)
    except OSError as error:
        raise DataError(f"shard {path}: cannot be read: {error.strerror}") from error


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _remote(root: str, endings: Sequence[str]) -> tuple[list[Shard], dict[str, Any]]:
    fsspec = need("fsspec", f"data {root}")
    try:
        files, path = fsspec.core.url_to_fs(root)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"data {root}: {error}") from error
    scheme = root.partition("://")[0]

    def url(found: str) -> str:
        return found if is_remote(found) else f"{scheme}://{found.lstrip('/') if scheme != 'memory' else found}"

    try:
        if path.endswith(tuple(endings)) and "*" not in root:
            return [Shard(path.rsplit("/", 1)[-1], root, int(files.info(path)["size"]))], {}
        if "*" not in root and files.exists(f"{path.rstrip('/')}/{INDEX}"):
            text = files.cat_file(f"{path.rstrip('/')}/{INDEX}").decode()
            return _indexed(root.rstrip("/"), text, lambda name: None, remote=True)
        entries = files.glob(path, detail=True) if "*" in root else files.find(path, detail=True)
    except (OSError, TimeoutError) as error:
        raise DataError(f"data {root}: cannot be listed: {error or type(error).__name__}") from error
    base = path.split("*")[0].rsplit("/", 1)[0] if "*" in root else path.rstrip("/")
    found = [
        Shard(name.removeprefix(base).lstrip("/"), url(name), int(entry["size"] or 0))
        for name, entry in sorted(entries.items())
        if entry.get("type") != "directory" and ("*" in root or name.endswith(tuple(endings)))
    ]
    return found, {}


def _indexed(
    root: str, text: str, size_of: Callable[[str], int | None], remote: bool = False
) -> tuple[list[Shard], dict[str, Any]]:
    """Return the shards that an index lists; those of this machine must be there, whole."""
    try:
        index = json.loads(text)
        listed = [
            Shard(
                entry["name"], f"{root}/{entry['name']}", int(entry["bytes"]), int(entry["crc32"], 16), entry["tokens"]
            )
            for entry in index.pop("shards")
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"data {root}: its {INDEX} cannot be read: {error!r}; pack it again") from error
    _refuse_twins(listed)
    for shard in () if remote else listed:
        size = size_of(shard.name)
        if size is None:
            raise DataError(f"shard {shard.name}: is missing in {root}, but {INDEX} lists it; bring it back")
        if size != shard.num_bytes:
            raise DataError(
                f"shard {shard.name}: has {size} bytes, but {INDEX} says {shard.num_bytes}: "
                f"it is {'truncated' if size < shard.num_bytes else 'not the one that was packed'}; bring it back whole"
            )
    return listed, index


def fingerprint(shards: Sequence[Shard], *more: object) -> str:
    """Return a digest of names, sizes and checksums, and of both ends of some of the files that have no checksum."""
    digest = hashlib.sha256(repr(more).encode())
    step = max(1, len(shards) // _LOOKED_AT)
    for number, shard in enumerate(shards):
        digest.update(f"{shard.name}\0{shard.num_bytes}\0{shard.checksum}\n".encode())
        if number % step == 0 and shard.checksum is None and not shard.remote:
            try:
                with open(shard.place, "rb") as file:
                    digest.update(file.read(_ENDS))
                    file.seek(max(0, shard.num_bytes - _ENDS))
                    digest.update(file.read(_ENDS))
            except OSError as error:
                raise DataError(f"shard {shard.name}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:12]
