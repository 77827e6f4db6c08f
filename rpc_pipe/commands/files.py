"""Output files of a command, which are checked before anything runs, as training may take hours."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..dependency import ConfigError


def try_files(typed: Mapping[str, Any], names: Iterable[str]) -> None:
    """Make the folders of the files of the options `names`, and check that all can be written.

    Raises:
        ConfigError: one cannot be, or two are the same.
    """
    taken: dict[Path, str] = {}
    for name in names:
        if name in typed:
            option = f"--{name} {typed[name]}"
            path = Path(typed[name])
            _try(option, path)
            other = taken.setdefault(Path(os.path.realpath(path)), f"--{name}")
            if other != f"--{name}":
                raise ConfigError(f"{option}: {other} writes the same file")


def _try(option: str, path: Path) -> None:
    try:
        if path.is_dir() or option.endswith("/"):
            raise ConfigError(f"{option}: is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):  # a finished file may be moved to its place
            pass
        _try_old(option, path)
    except FileExistsError as error:
        raise ConfigError(f"{option}: {error.filename} is a file, not a folder") from error
    except OSError as error:
        raise ConfigError(f"{option}: cannot be written: {error.strerror}") from error


def _try_old(option: str, path: Path) -> None:
    """Check that an existing file may be overwritten."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    moved = option.startswith("--save ")  # it is replaced by another file, which would remove a device
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (moved and not stat.S_ISREG(mode)):
        raise ConfigError(f"{option}: is not a regular file")
    path.open("ab").close()


def write(path: str, text: str) -> None:
    """Write a text file.

    Raises:
        OSError: it cannot be; the error names it.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = path  # errors of a full disk name no file
        raise
