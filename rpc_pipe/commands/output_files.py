"""Output files of a command, which are checked before anything runs, as training may take hours."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..system.files import write as write


def try_files(typed: Mapping[str, Any], names: Iterable[str]) -> None:
    """Make the folders of the files of the options `names`, and check that all can be written.

    Raises:
        ConfigError: one cannot be, or two are the same.
    """
    taken: dict[str, str] = {}
    for name in [name for name in names if name in typed]:
        path = Path(typed[name])
        option = f"{'' if name == 'file' else f'--{name} '}{typed[name]}"
        try:
            if path.is_dir() or option.endswith("/"):
                raise ConfigError(f"{option}: is a folder; name a file in it")
            if path.is_fifo() and not os.path.realpath(path).startswith("/proc/"):  # as /dev/stdout may be
                raise ConfigError(f"{option}: is a pipe, which would wait for a reader; name a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):  # a finished file may be moved to its place
                pass
            if path.exists():
                path.open("ab").close()
        except FileExistsError as error:
            raise ConfigError(f"{option}: {error.filename} is a file, not a folder") from error
        except OSError as error:
            raise ConfigError(f"{option}: cannot be written: {error.strerror}") from error
        if (other := taken.setdefault(os.path.realpath(path), name)) != name:
            raise ConfigError(f"{option}: --{other} writes the same file")
