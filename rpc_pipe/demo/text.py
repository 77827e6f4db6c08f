"""Where the text comes from: a file, a folder, or the sources of Python's standard library. Torch-free."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from ..dependency import ConfigError

#: every so many-th chunk of the text is held out
HELD_OUT_EVERY = 10


def default_text() -> list[Path]:
    """Return the sources of Python's standard library, which lie on every machine."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    found: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = set(folders) - skipped
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def read_text(data: str | None, context: int) -> bytes:
    """Return the bytes of the files that `--data` names, one behind the other.

    Raises:
        ConfigError: there is nothing readable, or too little for samples of `context` bytes.
    """
    if data is None:
        files = default_text()
    elif (path := Path(data)).is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    else:
        files = [path]
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
