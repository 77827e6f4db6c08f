"""The folders of the runs on this machine, in shared memory: boards, and the launcher's identity."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..dependency import ConfigError
from .board import Board

#: environment variable: this run's folder; `off`: keep no boards
FOLDER = "RPC_PIPE_BOARDS"
OFF = "off"
#: file in a run's folder: the launcher's identity
LAUNCHER = "launcher"
#: where the folders of all users are; else in that for temporary files
_MEMORY = Path("/dev/shm")
#: prefix of files that name processes which need a folder
_MEMBER = "member-"
#: file that watchers touch
WATCHED = "watched"
#: an empty folder younger than this may belong to a run that is starting
_YOUNG_S = 600


def root() -> Path:
    """Return the folder of all runs of this user, which nobody else can read.

    Raises:
        ConfigError: it belongs to another user.
    """
    for above in (_MEMORY, Path(tempfile.gettempdir())):
        if os.access(above, os.W_OK):
            path = above / f"rpc-pipe-{os.getuid()}"
            path.mkdir(mode=0o700, exist_ok=True)
            if path.lstat().st_uid == os.getuid():
                return path
    raise ConfigError(f"{above}: must be a folder that you can write to, without a rpc-pipe-{os.getuid()} of others")


def folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of this process's run, which is made if missing; None: the run keeps no boards.

    Raises:
        ConfigError, OSError: it cannot be made.
    """
    given = environ.get(FOLDER)
    if given == OFF:
        return None
    if given:
        return Path(given)
    if "MASTER_PORT" not in environ or "RANK" not in environ:
        return new_folder()
    sweep()
    # torchrun: the workers of a machine agree on a name; with the host's, as containers may share memory
    run = re.sub(r"[^\w.-]", "_", environ.get("TORCHELASTIC_RUN_ID", "run"))
    path = root() / f"torchrun-{run}-{environ['MASTER_PORT']}-{socket.gethostname()}"
    path.mkdir(exist_ok=True)
    return path


def new_folder() -> Path:
    """Make a folder for a run that this process starts.

    Raises:
        ConfigError, OSError: it cannot be made.
    """
    sweep()
    path = root() / f"run-{os.getpid()}"
    try:
        path.mkdir()
    except FileExistsError:  # of a process that had our number before, perhaps in another container
        path = root() / f"run-{os.getpid()}-{secrets.token_hex(3)}"
        path.mkdir()
    return path


def new_launchers_folder() -> Path:
    """Make a folder for a run whose workers this process starts.

    Raises:
        ConfigError, OSError: it cannot be made; nothing is left of it.
    """
    path = new_folder()
    try:
        (path / LAUNCHER).write_text(identity())
    except OSError:  # the memory is full
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def new_temporary_folder() -> Path:
    """Make a temporary folder for the rendezvous of workers; remove those of launchers that were killed."""
    for left in Path(tempfile.gettempdir()).glob("rpc-pipe-*"):
        with suppress(OSError):  # it is no launcher's, or of another user
            mine = left.lstat().st_uid == os.getuid() and not left.is_symlink()
            if mine and not alive((left / LAUNCHER).read_text()):
                shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix="rpc-pipe-"))
    with suppress(OSError):  # the disk is full
        (path / f"{LAUNCHER}.new").write_text(identity())
        (path / f"{LAUNCHER}.new").replace(path / LAUNCHER)  # atomically
    return path


def sweep() -> None:
    """Remove the folders of runs that were killed."""
    for path in root().iterdir():
        with suppress(OSError):  # another process was faster
            there = processes(path) | _members(path)
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
    if not any(map(alive, _members(path))):
        shutil.rmtree(path, ignore_errors=True)


def _members(path: Path) -> set[str]:
    found = set()
    for file in path.glob(f"{_MEMBER}*"):
        with suppress(OSError):  # it has just left
            found.add(file.read_text())
    return found


def processes(path: Path) -> set[str]:
    """Return the processes of the run in the folder `path`: workers and launcher."""
    found = {board.header["process"] for board in boards(path).values()}
    with suppress(OSError):
        found.add((path / LAUNCHER).read_text())
    return found - {""}  # of a run that is just starting, or for which the memory was full


def has_launcher(path: Path) -> bool:
    """Return whether the launcher of the run in the folder `path` lives."""
    with suppress(OSError):
        return alive((path / LAUNCHER).read_text())
    return False


def identity() -> str:
    """Return a unique name of this process: process id, start time, pid namespace."""
    process = os.getpid()
    return f"{process}/{_stat(process)[19]}/{os.readlink('/proc/self/ns/pid')}"


def alive(process: str) -> bool:
    """Return whether a process lives; True for one in another container, of which that is unknown."""
    return state_of(process) not in ("", "Z", "X")


def state_of(process: str) -> str:
    """Return the state letter of a process (proc(5)), such as T: stopped; "": it has ended, "?": unknown."""
    number, started, namespace = [*process.split("/"), "", ""][:3]
    if not number.isdecimal():  # cut off where the memory was full
        return ""
    if namespace != os.readlink("/proc/self/ns/pid"):
        return "?"
    try:
        fields = _stat(int(number))
    except OSError:
        return ""
    return fields[0] if fields[19] == started else ""


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state, on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def board_files(path: Path) -> dict[int, Path]:
    """Return the files of boards in a run's folder, by worker."""
    return {int(file.name[7:]): file for file in sorted(path.glob("worker-*")) if file.name[7:].isdecimal()}


def boards(path: Path) -> dict[int, Board]:
    """Return the boards in a run's folder, by worker."""
    found = {}
    for worker, file in sorted(board_files(path).items()):
        with suppress(OSError, ValueError):  # just removed, or of another version
            found[worker] = Board(file)
    return found


def running() -> Iterator[Path]:
    """Yield the folders of the runs on this machine, the newest first."""
    for path in sorted(root().iterdir(), key=lambda path: -path.stat().st_mtime):
        if any(map(alive, processes(path))):
            yield path


def find(address: str | None) -> Path:
    """Return the folder of the run that `address` names: its script, folder or a process id; None: the only run.

    Raises:
        ConfigError: no run, or several, have this name.
    """
    there = list(running())
    if address is None:
        if not there:
            raise ConfigError(
                "watch: no run found on this machine; start one with rpc-pipe run, or name a recording: "
                "rpc-pipe watch run.jsonl"
            )
        if len(there) > 1:
            raise ConfigError(f"watch: {len(there)} runs are going on; name one of {', '.join(map(_shown, there))}")
        return there[0]
    for path in there:
        numbers = {process.partition("/")[0] for process in processes(path)}
        if address in numbers or address == path.name or Path(address) == path:
            return path
    named = [
        path for path in there if Path(address).name in {board.header.get("script") for board in boards(path).values()}
    ]
    if len(named) == 1:
        return named[0]
    if named:
        raise ConfigError(
            f"watch {address}: {len(named)} runs of it are going on; name one of {', '.join(map(_shown, named))}"
        )
    known = f"running are {', '.join(map(_shown, there))}" if there else "none is running on this machine"
    raise ConfigError(f"watch {address}: there is no such run; {known}")


def _shown(path: Path) -> str:
    headers = [board.header for board in boards(path).values()]
    if not headers:
        return f"{path.name} (starting)"
    first = headers[0]
    since = time.strftime("%H:%M:%S", time.localtime(first["started"]))
    return f"{path.name} ({first.get('script', '')} since {since}, {first['schedule']} on {len(headers)} workers)"
