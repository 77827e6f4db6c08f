"""Where the text comes from: a file, a folder, or the sources of Python's standard library. Torch-free."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from pathlib import Path

from ..dependency import ConfigError

#: every so many-th chunk of the text is held out
HELD_OUT_EVERY = 10


def default_text() -> list[Path]:
    """Return the sources of Python's standard library, which lie on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    paths = root.rglob("*.py")
    return sorted(path for path in paths if not skipped & set(path.relative_to(root).parts))


def find_text(data: str | None, context: int) -> Path:
    """Return one file with the text that `--data` names; the standard library's sources by default.

    Raises:
        ConfigError: there is nothing readable, or too little for samples of `context` bytes.
    """
    path = _joined(default_text() if data is None else _named(data))
    size, least = path.stat().st_size, HELD_OUT_EVERY * (context + 1)
    if size < least:
        raise ConfigError(
            f"--data {data}: has {size} bytes; samples of {context} bytes and a held-out tenth need at least {least}"
        )
    return path


def _named(data: str) -> list[Path]:
    path = Path(data)
    if not path.exists():
        raise ConfigError(f"--data {data}: there is no such file or folder")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"--data {data}: the folder has no files")
    for file in files:
        try:
            if not file.is_file():  # a pipe or a device, which may never end
                raise ConfigError(f"--data {file}: is not a regular file")
            with file.open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"--data {file}: cannot be read: {error.strerror}") from error
    return files


def _joined(files: list[Path]) -> Path:
    """Return one file with the bytes of all; several are joined once and kept in the user's cache."""
    if len(files) == 1:
        return files[0]
    stats = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    name = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rpc-pipe"
    joined = cache / f"{name}.txt"
    if not joined.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=cache, delete=False) as temporary:
                for file in files:
                    temporary.write(file.read_bytes())
            Path(temporary.name).replace(joined)  # several workers may do this at once: the last one wins
        except OSError as error:
            raise ConfigError(
                f"{cache}: {len(files)} files of text cannot be kept there as one: {error.strerror}; set "
                "XDG_CACHE_HOME to a folder that can be written, or name a single file with --data"
            ) from error
    return joined
