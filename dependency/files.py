"""Reading of untrusted files: regular files of an expected size, or one clear error."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from .errors import ConfigError

#: errors of data of another form than expected
DAMAGED = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
#: most bytes of a file of code
_MOST_CODE_BYTES = 2**21
#: no file of JSON is larger, unless more is said, and none has more values: each takes some 100 bytes of memory
_MOST_JSON_BYTES, _MOST_VALUES = 2**25, 2_000_000


@contextmanager
def opened(path: Path, said: str, most_bytes: int, encoding: str = "utf-8") -> Iterator[TextIO]:
    """Return a context with a text file that is open for reading; what cannot be read in it is told as here.

    Args:
        said: what was typed, for errors.
        most_bytes: no file of this kind is larger.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe without a writer would block
        with open(descriptor, encoding=encoding, newline="") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{said}: is not a regular file")
            if found.st_size > most_bytes:
                raise ConfigError(f"{said}: has {found.st_size} bytes; at most {most_bytes} are read")
            yield file
    except OSError as error:
        raise ConfigError(f"{said}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said}: is no text: {error}") from error


def read_file(path: Path, said: str, most_bytes: int, encoding: str = "utf-8") -> str:
    """Return the text in a file.

    Args:
        said, most_bytes: as of `opened`.

    Raises:
        ConfigError: as `opened`.
    """
    with opened(path, said, most_bytes, encoding) as file:
        return file.read(most_bytes + 1)


def read_json(path: Path, said: str, most_bytes: int = _MOST_JSON_BYTES) -> Any:
    """Return the value that a file of JSON holds.

    Args:
        said, most_bytes: as of `opened`.

    Raises:
        ConfigError: as `opened`, or it is no JSON.
    """
    text = read_file(path, said, most_bytes, "utf-8-sig")
    if (count := sum(map(text.count, ",[{"))) > _MOST_VALUES:
        raise ConfigError(f"{said}: has {count} values; at most {_MOST_VALUES} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{said}: cannot be read as JSON: {error}") from error


def refuse_large_code(path: Path, said: str) -> None:
    """Refuse what no code is: compiling it takes hundreds of times its size.

    Raises:
        ConfigError: the file is too large.
    """
    if (size := path.stat().st_size) > _MOST_CODE_BYTES:
        raise ConfigError(f"{said}: {path} has {size} bytes; at most {_MOST_CODE_BYTES} of code are read")


def load_module(path: Path, name: str, said: str, *, first: bool = False) -> ModuleType:
    """Run a Python file of the user's and return it as a module; files beside it can be imported, as by a script.

    Args:
        name: of the module, by which dataclasses and pickle find what it defines.
        said: what was typed, for errors.
        first: whether files beside it precede installed packages.

    Raises:
        ConfigError: there is no such file, or it raises.
    """
    if not path.is_file():
        raise ConfigError(f"{said}: there is no file {path}")
    refuse_large_code(path, said)
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
