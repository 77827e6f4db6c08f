"""Files that somebody else may have written: regular ones, of a size that is expected, or one clear error."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError

#: no file of code is larger
_MOST_CODE_BYTES = 2**24


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


def read_json(path: Path, said: str, most_bytes: int = 2**26) -> Any:
    """Return the value that a file of JSON holds.

    Args:
        said, most_bytes: as of `read_file`.

    Raises:
        ConfigError: as `read_file`, or it is no JSON.
    """
    text = read_file(path, said, most_bytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{said}: cannot be read as JSON: {error}") from error


def load_module(path: Path, name: str, said: str, *, first: bool = False) -> ModuleType:
    """Run a Python file of the user's and return it as a module; what stands beside it can be imported, as in a script.

    Args:
        name: of the module, by which dataclasses and pickle find what it defines.
        said: what was typed, for errors.
        first: whether what stands beside it comes before what is installed.

    Raises:
        ConfigError: there is no such file, or it raises.
    """
    if not path.is_file():
        raise ConfigError(f"{said}: there is no file {path}")
    if path.stat().st_size > _MOST_CODE_BYTES:
        raise ConfigError(f"{said}: {path} has {path.stat().st_size} bytes; at most {_MOST_CODE_BYTES} are read")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0 if first else len(sys.path), folder)
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{said}: {path} raised {type(error).__name__}: {error}") from error
    return module
