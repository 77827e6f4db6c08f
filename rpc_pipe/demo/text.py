"""Where the text comes from: a file, a folder, or the sources of Python's standard library. Torch-free."""

from __future__ import annotations

import sysconfig
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


def read_text(data: str | None, context: int) -> bytes:
    """Return the bytes of the files that `--data` names, one behind the other.

    Raises:
        ConfigError: there is nothing readable, or too little for samples of `context` bytes.
    """
    files = default_text()
    if data is not None:
        path = Path(data)
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    try:
        text = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise ConfigError(f"--data {error.filename}: cannot be read: {error.strerror}") from error
    if len(text) < (least := HELD_OUT_EVERY * (context + 1)):
        raise ConfigError(
            f"--data {data}: has {len(text)} bytes; samples of {context} bytes and a held-out tenth need at least "
            f"{least}"
        )
    return text
