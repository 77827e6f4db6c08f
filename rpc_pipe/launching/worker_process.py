"""Worker processes, their messages to the launcher, and logs of their output. Loads without torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from . import launcher_link as link

#: most bytes that are read at once; longer lines, as of progress bars, are shown in parts
_LONGEST_LINE = 8192
#: most that is read after the end of a process, as a child of it may still print
_LAST_WORDS = 256
#: environment variable: folder of all logs; `off`: no logs
LOGS = "RPC_PIPE_LOGS"
#: most bytes of a log; the rest is only shown
_MOST_BYTES = 2**26
#: number of failed runs with kept logs
_KEPT = 10


class WorkerEvent(NamedTuple):
    """An event of a worker: it `told` a message, `printed` a line, or `ended` with an exit code."""

    what: str
    worker: int
    detail: Any


class WorkerProcess:
    """One worker process, with the pipe of its output and the socket of messages and orders."""

    def __init__(self, rank: int, command: list[str], environment: dict[str, str], logs: Logs | None = None) -> None:
        self.rank = rank
        self._logs = logs
        self._link, of_worker = socket.socketpair()
        with of_worker:
            try:
                self.process = subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank), link.LINK: str(of_worker.fileno())},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[of_worker.fileno()],
                    start_new_session=True,  # the terminal's Ctrl-C must reach the launcher alone
                )
            except OSError:  # the launcher needs the descriptors to clean up
                self._link.close()
                raise
        assert self.process.stdout is not None
        #: pipes that are read, with the part of a line that has arrived, until the process's end
        self.pipes: dict[Any, bytes] = {self.process.stdout: b"", self._link: b""}
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)
        #: whether its end has been reported
        self.ended = False

    def order(self, order: bytes) -> None:
        """Send an order of the launcher."""
        with suppress(OSError):  # it has ended
            self._link.send(order)

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        for pipe in self.pipes:
            pipe.close()
        self.pipes = {}
        return self.process.wait()

    def read(self, pipe: Any) -> Iterator[WorkerEvent]:
        """Yield the events from one of its pipes."""
        try:
            read = os.read(pipe.fileno(), _LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:  # it has ended before it has read an order
            read = b""
        *lines, rest = (self.pipes[pipe] + read).split(b"\n")
        if pipe is self._link:
            for line in lines:
                with suppress(ValueError):  # cut short, as by the end of the worker or by its script's writing there
                    yield WorkerEvent("told", self.rank, json.loads(line))
        else:
            if self._logs is not None:
                self._logs.write(self.rank, read)
            if rest and (len(rest) > _LONGEST_LINE or not read):
                lines, rest = [*lines, rest], b""
            for line in lines:  # as a terminal would finally show it
                shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").rstrip()
                yield WorkerEvent("printed", self.rank, shown)
        self.pipes[pipe] = rest
        if not read:
            del self.pipes[pipe]
            pipe.close()

    def rest(self) -> Iterator[WorkerEvent]:
        """Yield the last events before its end, and the end."""
        self.ended = True
        for _ in range(_LAST_WORDS):
            for pipe in wait([*self.pipes], 0):
                yield from self.read(pipe)
        for pipe, part in self.pipes.items():  # which a child of it holds
            if part and pipe is not self._link:
                yield WorkerEvent("printed", self.rank, part.decode(errors="replace"))
        yield WorkerEvent("ended", self.rank, self.end())


def hear(workers: Sequence[WorkerProcess], timeout_s: float) -> Iterator[WorkerEvent]:
    """Yield the workers' events; wait for a limited time if there is none."""
    ended = [worker for worker in workers if not worker.ended and worker.process.poll() is not None]
    pipes = {pipe: worker for worker in workers for pipe in worker.pipes}
    for pipe in wait([*pipes], 0 if ended else timeout_s):
        yield from pipes[pipe].read(pipe)
    for worker in ended:
        yield from worker.rest()


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

    def __init__(self, num_processes: int) -> None:
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
            self._files = [(folder / f"worker-{rank}.log").open("wb", buffering=0) for rank in range(num_processes)]
            self.folder = folder

    def write(self, worker: int, data: bytes) -> None:
        """Append a worker's output."""
        with suppress(OSError, IndexError, ValueError):  # a full disk does not end training; it may be closed
            file = self._files[worker]
            if (left := _MOST_BYTES - file.tell()) > 0:
                file.write(data[:left])
                if len(data) >= left:
                    file.write(b"\n[no more is kept]\n")

    def close(self, keep: bool) -> None:
        """Close the logs, and keep or remove them."""
        kept = bool(self._files)
        for file in self._files:
            file.close()
        self._files = []
        if self.folder is not None and not (keep and kept):
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                self.folder.parent.rmdir()


def _prune(root: Path) -> None:
    runs = sorted(root.glob("run-*"), key=lambda path: path.stat().st_mtime)
    for path in runs[: -_KEPT + 1]:
        if not Path("/proc", path.name.removeprefix("run-")).exists():
            shutil.rmtree(path, ignore_errors=True)


#: seconds that a line waits for the same line of the other workers
PATIENCE_S = 0.3


class Printed:
    """Shows the lines of each worker in its order, and a line of all workers alike once.

    Args:
        workers: the workers with lines to show.
        show: shows one line: (the workers that printed it, text).
    """

    def __init__(self, workers: Collection[int], show: Callable[[list[int], str], None]) -> None:
        self._workers, self._show = set(workers), show
        #: lines, each with the time of its first print and the workers that have printed it
        self._waiting: deque[tuple[str, float, list[int]]] = deque()

    def add(self, worker: int, text: str) -> None:
        """Take a line; it is shown by a later `show` at the latest."""
        if worker not in self._workers:
            return
        same: list[int] | None = None
        for line, _, workers in self._waiting:
            if worker in workers:  # the worker has printed this line, so its new one is later
                same = None
            elif same is None and line == text:
                same = workers
        if same is None:
            self._waiting.append((text, time.monotonic(), same := []))
        same.append(worker)
        self.show(PATIENCE_S)

    def show(self, patience_s: float = 0.0) -> None:
        """Show the first lines that all workers have printed, or that have waited for `patience_s`."""
        while self._waiting:
            text, since, workers = self._waiting[0]
            if len(workers) < len(self._workers) and time.monotonic() < since + patience_s:
                return
            self._waiting.popleft()
            self._show(workers, text)
