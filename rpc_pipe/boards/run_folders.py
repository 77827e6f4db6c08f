"""The folders of the runs on this machine, in shared memory: boards, the launcher's identity, how a run ended.

The process that ends a run writes the cause and then removes the folder. A watcher opens that file at its first poll,
so it can read the last lines even after the removal.
"""

import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..dependency import ConfigError
from ..system.files import process_stat, read_file

#: environment variable: this run's folder; `off`: keep no boards
FOLDER = "RPC_PIPE_BOARDS"
OFF = "off"
#: environment variable set by the launcher: whether a newcomer takes the place of a worker that has died
NEWCOMER = "RPC_PIPE_NEWCOMER"
#: prefix of files that name processes which need a folder; the launcher's
_MEMBER = "member-"
LAUNCHER = f"{_MEMBER}launcher"
#: prefixes of the folders of runs, and of folders where workers meet unwatched
RUN, SOCKETS = "run-", "sockets-"
#: where the folders of all users are; else in that for temporary files
_MEMORY = Path("/dev/shm")
#: file that watchers touch
WATCHED = "watched"
#: an empty folder younger than this may belong to a run that is starting
_YOUNG_S = 600
#: the file's name in a run's folder
END = "end"
#: file with lines of the launcher for watchers: seconds since the epoch, a text, and whether it is a warning
EVENTS = "events"
#: longer causes are cut off
_MOST_TEXT = 8_000
RUN_FAILED, RUN_STOPPED = "failed", "was stopped"


def root() -> Path:
    """Return the folder of all runs of this user, which no other user can enter.

    Raises:
        ConfigError: another user has taken its name.
    """
    for above in (_MEMORY, Path(tempfile.gettempdir())):
        if os.access(above, os.W_OK):
            path = above / f"rpc-pipe-{os.getuid()}"
            with suppress(OSError):  # a file, a pipe or a link of this name, or another user's folder
                path.mkdir(mode=0o700, exist_ok=True)
                there = path.lstat()
                if stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid():
                    path.chmod(0o700)
                    return path
    raise ConfigError(f"{above}: must be a folder that you can write to, without a rpc-pipe-{os.getuid()} of others")


def folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of this process's run, which is made if missing; None: the run keeps no boards.

    Raises:
        ConfigError, OSError: it cannot be made.
    """
    if given := environ.get(FOLDER):
        return None if given == OFF else Path(given)
    if "MASTER_PORT" not in environ or "RANK" not in environ:
        return new_folder()
    sweep()
    # torchrun: the workers of a machine agree on a name; with the host's, as containers may share memory
    run = re.sub(r"[^\w.-]", "_", environ.get("TORCHELASTIC_RUN_ID", "run"))
    path = root() / f"torchrun-{run}-{environ['MASTER_PORT']}-{socket.gethostname()}"
    path.mkdir(exist_ok=True)
    return path


def new_folder(prefix: str = RUN) -> Path:
    """Make a folder for a run that this process starts.

    Raises:
        ConfigError, OSError: it cannot be made.
    """
    sweep()
    path = root() / f"{prefix}{os.getpid()}"
    if path.exists():  # of a process that had our number before, perhaps in another container
        path = root() / f"{prefix}{os.getpid()}-{secrets.token_hex(3)}"
    path.mkdir(mode=0o700)
    return path


def new_launchers_folder(watched: bool) -> Path:
    """Make the folder of an attempt that this process starts and ends: its workers meet there, and have their boards.

    Args:
        watched: whether watchers find it.

    Raises:
        ConfigError, OSError: it cannot be made; nothing is left of it.
    """
    path = new_folder(RUN if watched else SOCKETS)
    try:
        (path / LAUNCHER).write_text(identity())
    except OSError:  # the memory is full
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def sweep() -> None:
    """Remove the folders of runs that were killed."""
    for path in root().iterdir():
        with suppress(OSError):  # another process was faster
            there = processes(path)
            if not there and time.time() < path.stat().st_mtime + _YOUNG_S:
                continue
            if not any(map(alive, there)):
                shutil.rmtree(path, ignore_errors=True)


def enter(path: Path) -> None:
    """Register this process as a user of the folder `path`, which is kept while the process lives."""
    (path / f"{_MEMBER}{os.getpid()}").write_text(identity())


def leave(path: Path) -> None:
    """Unregister this process; the last one removes the folder."""
    (path / f"{_MEMBER}{os.getpid()}").unlink(missing_ok=True)
    if not in_use(path):
        shutil.rmtree(path, ignore_errors=True)


def processes(path: Path) -> set[str]:
    """Return the processes that use the folder `path`: of a run its launcher, or its workers."""
    found = set()
    for file in path.glob(f"{_MEMBER}*"):
        with suppress(OSError, ConfigError):  # it has just left, or is no file of ours
            found.add(read_file(file, file.name))
    return found - {""}  # a run that is just starting, or that found the memory full


def in_use(path: Path) -> bool:
    """Return whether a process that uses the folder `path` lives."""
    return any(map(alive, processes(path)))


def identity() -> str:
    """Return a unique name of this process: process id, start time, pid namespace."""
    process = os.getpid()
    return f"{process}/{process_stat(process)[19]}/{os.readlink('/proc/self/ns/pid')}"


def alive(process: str) -> bool:
    """Return whether a process lives; True for one in another container, which cannot be looked up."""
    return state_of(process) not in ("", "Z", "X")


def state_of(process: str) -> str:
    """Return the state letter of a process (proc(5)), such as T: stopped; "": it has ended, "?": unknown."""
    number, started, namespace = [*process.split("/"), "", ""][:3]
    if number.isdecimal() and namespace != os.readlink("/proc/self/ns/pid"):
        return "?"
    with suppress(OSError, ValueError):  # it has gone; or its name was cut off where the memory was full
        fields = process_stat(int(number))
        return fields[0] if fields[19] == started else ""
    return ""


class Ending(NamedTuple):
    """How a run, or a worker of it, ended."""

    #: RUN_FAILED or RUN_STOPPED
    what: str
    #: why
    text: str
    #: whether the end of another worker has caused it
    consequence: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


def tell_end(folder: Path, ending: Ending) -> None:
    """Write an end for watchers, if possible."""
    line = json.dumps(ending._replace(text=ending.text[:_MOST_TEXT]))
    with suppress(OSError), (folder / END).open("a") as file:
        file.write(line + "\n")  # in one piece, as other workers may write too


def tell_event(folder: Path, text: str, *, warning: bool) -> None:
    """Write an event of a run for its watchers."""
    with suppress(OSError), (folder / EVENTS).open("a") as file:  # there may be no room
        file.write(json.dumps([time.time(), text, warning]) + "\n")
