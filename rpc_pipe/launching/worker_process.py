"""Worker processes, as the launcher holds them, their events, and logs of what they print. Loads without torch."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from . import launcher_link as link

#: most events that wait to be handled; workers that print more wait
MOST_UNREAD = 256
#: longer lines, as of progress bars, are shown in parts
_LONGEST_LINE = 8192
#: seconds to read a worker's pipes after its end, as a child process may keep them open
_LAST_WORDS_S = 1.0
#: environment variable: folder of all logs; `off`: no logs
LOGS = "RPC_PIPE_LOGS"
#: most bytes of a log; the rest is only shown
_MOST_BYTES = 2**26
#: number of failed runs whose logs are kept
_KEPT = 10


class WorkerEvent(NamedTuple):
    """An event of a worker: `told` a message, `printed` a line, `no more` messages, or `ended` with an exit code."""

    what: str
    worker: int
    detail: Any


#: the events of all workers, in the order in which they came
Events = queue.Queue[WorkerEvent]


class WorkerProcess:
    """One worker process with its pipes, read by threads into `events`."""

    def __init__(
        self, rank: int, command: list[str], environment: dict[str, str], events: Events, logs: Logs | None = None
    ) -> None:
        self._rank = rank
        self._logs = logs
        self._events = events
        ends: list[int] = []
        try:
            ends += os.pipe()
            ends += os.pipe()
            leash_end, leash, told, tell_end = ends
            self.process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), link.LEASH: str(leash_end), link.TELL: str(tell_end)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(leash_end, tell_end),
                start_new_session=True,  # the terminal's Ctrl-C must reach the launcher alone
            )
        except OSError:  # the launcher needs the descriptors to clean up
            for end in ends:
                os.close(end)
            raise
        self._leash = open(leash, "wb", buffering=0)
        os.close(leash_end)
        os.close(tell_end)
        readers = [
            threading.Thread(target=self._read_told, args=(told,), daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        try:
            for reader in (*readers, threading.Thread(target=self._await_end, args=(readers,), daemon=True)):
                reader.start()
        except RuntimeError:  # the system cannot start a thread
            self.kill()
            raise

    def order_stop(self) -> None:
        """Ask it to finish the step and stop."""
        with suppress(OSError, ValueError):  # it has ended
            self._leash.write(link.STOP)

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _put(self, what: str, detail: Any) -> None:
        self._events.put(WorkerEvent(what, self._rank, detail))

    def _read_told(self, descriptor: int) -> None:
        with open(descriptor) as lines:
            for text in lines:
                with suppress(ValueError):  # it was killed in the middle of a message
                    self._put("told", json.loads(text))
        self._put("no more", None)

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        with self.process.stdout as output:
            while read := os.read(output.fileno(), _LONGEST_LINE):
                if self._logs is not None:
                    self._logs.write(self._rank, read)
                *lines, rest = (rest + read).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._put("printed", _shown(line))
        if rest:
            self._put("printed", _shown(rest))

    def _await_end(self, readers: list[threading.Thread]) -> None:
        code = self.process.wait()
        deadline = time.monotonic() + _LAST_WORDS_S
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self._leash.close()
        self._put("ended", code)


def _shown(line: bytes) -> str:
    """Return a printed line as a terminal would finally show it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").rstrip()


def log_root() -> Path | None:
    """Return the folder of this user's logs, in the user's state folder (XDG Base Directory Specification)."""
    given = os.environ.get(LOGS)
    if given == "off":
        return None
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rpc-pipe" / "logs"


class Logs:
    """The logs of a run. If they cannot be written, they are omitted."""

    def __init__(self, num_workers: int) -> None:
        self.folder: Path | None = None
        self._files: list[BinaryIO] = []
        with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home folder
            root = log_root()
            if root is None:
                return
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _prune(root)
            folder = root / f"run-{os.getpid()}"
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this id
            folder.mkdir(mode=0o700)
            self._files = [(folder / f"worker-{worker}.log").open("wb", buffering=0) for worker in range(num_workers)]
            self.folder = folder

    def write(self, worker: int, data: bytes) -> None:
        """Append what a worker has printed."""
        with suppress(OSError, IndexError, ValueError):  # a full disk does not end training; it may be closed
            file = self._files[worker]
            if (left := _MOST_BYTES - file.tell()) > 0:
                file.write(data[:left])
                if len(data) >= left:
                    file.write(b"\n[no more is kept]\n")

    def close(self, keep: bool) -> None:
        """Close the logs, and keep or remove them."""
        for file in self._files:
            file.close()
        self._files = []
        if self.folder is not None and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                self.folder.parent.rmdir()


def _prune(root: Path) -> None:
    runs = sorted(root.glob("run-*"), key=lambda path: path.stat().st_mtime)
    for path in runs[: -_KEPT + 1]:
        if not Path("/proc", path.name.removeprefix("run-")).exists():
            shutil.rmtree(path, ignore_errors=True)
