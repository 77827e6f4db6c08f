"""Files that a user names: their content, or one clear error; and files that are there whole or not at all."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..dependency import ConfigError, PipeError

#: most bytes of a file that a user writes or edits; as JSON it takes up to fifty times the memory
MOST_BYTES = 2**23
#: a starter of workers does not have this variable, and all its descendants do
_OF_WORKERS = b"RANK="
#: errors of data of another form than expected
DAMAGED = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError


def read_file(path: Path, said: str, encoding: str = "utf-8", most: int = MOST_BYTES) -> str:
    """Return the text in a file of at most `most` bytes.

    Args:
        said: the option as typed, for errors.

    Raises:
        ConfigError: the file cannot be read, is too large, or is no text.
    """
    refuse_special(path, said)
    try:
        with refused(ConfigError, f"{said}: cannot be read"):
            if path.stat().st_size > most:
                raise ConfigError(f"{said}: has more than {most >> 20} MiB, the most that is read")
            return path.read_text(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said}: is no text: {error}") from error


@contextmanager
def refused(kind: type[PipeError], said: str, advice: str = "") -> Iterator[None]:
    """Turn an error of the system in the body into a sentence: the option as `said`, the cause, and an advice.

    Raises:
        PipeError: as the type `kind`, instead of that error.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{said}: {error.strerror or error}{advice}") from error


def refuse_special(path: Path, said: str) -> None:
    """Refuse a folder, a pipe or a device: to open a pipe without a writer would wait for ever."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{said}: is not a regular file")


def read_json(path: Path, said: str, most: int = MOST_BYTES) -> Any:
    """Return the value that a file of JSON holds.

    Raises:
        ConfigError: as `read_file`, or it is no JSON.
    """
    text = read_file(path, said, "utf-8-sig", most)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{said}: cannot be read as JSON: {error}") from error


def write(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        OSError: it cannot be; the error names it.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = str(path)  # errors of a full disk name no file
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give where to write a file that is at `path` whole or not at all, and then on the disk."""
    partial = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def process_stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat (proc(5)) from the third, the state, on.

    Raises:
        OSError: the process has ended.
    """
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def starter() -> str:
    """Return an identity of the process that starts this job's workers on this host, unique over time."""
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):
        while process > 1 and any(word.startswith(_OF_WORKERS) for word in _environment(process)):
            process = int(process_stat(process)[1])  # a shell between the two
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {process} {process_stat(process)[19]}"
    return f"{socket.gethostname()} {process}"


def _environment(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
