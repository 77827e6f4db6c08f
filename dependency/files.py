"""Files that somebody else may have written: regular ones, of a size that is expected, or one clear error."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import ConfigError


def read_file(path: Path, said: str, most_bytes: int, encoding: str = "utf-8") -> str:
    """Return the text in a file.

    Args:
        said: what was typed, for errors.
        most_bytes: no file of this kind is larger.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would be waited for
        with open(descriptor, encoding=encoding, newline="") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{said}: is not a regular file")
            if found.st_size > most_bytes:
                raise ConfigError(f"{said}: has {found.st_size} bytes; at most {most_bytes} are read")
            return file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{said}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said}: is no text: {error}") from error
