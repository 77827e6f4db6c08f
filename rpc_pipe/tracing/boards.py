"""The runs on this machine, found by script, folder or process, and their boards, polled for what is new."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..system.files import DAMAGED
from ..workers.hooks import StepRecord
from . import run_folders
from .board import File, Live, State
from .board_reader import Board
from .run_folders import END, RUN_FAILED, WATCHED, Ending

#: how long a stuck worker has to write its stacks
_STACKS_S = 2.0


@dataclass
class RunUpdate:
    """What is new in a run since the last poll."""

    #: constant properties by worker
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: listing of the program by worker and number of microbatches
    listings: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    lives: Mapping[int, Live] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    #: workers whose process has ended
    gone: frozenset[int] = frozenset()
    #: the workers' clock, `perf_counter_ns`
    now_ns: int = 0
    #: largest difference of two workers' clocks
    clock_error_ms: float = 0.0
    #: records that were overwritten before they were read
    dropped: int = 0
    #: of a recording: (seconds since the epoch, message, whether it is a warning)
    events: list[tuple[float, str, bool]] = field(default_factory=list)
    #: how the run ended; None: it goes on, or nobody has said
    ending: Ending | None = None


class EndReader:
    """Reads how the run in a folder ended, even after the folder was removed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / END
        self._file: File | None = None
        self.read()  # from here on it has the file open

    def read(self) -> Ending | None:
        """Return the first cause, None if there is none yet."""
        with suppress(OSError):  # the folder has been removed
            new = File(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if self._file is None or not os.path.sameopenfile(new.number, self._file.number):
                self._file = new  # perhaps of workers that have been restarted
        told = []
        for line in self._file.read(0, self._file.size).splitlines() if self._file is not None else []:
            with suppress(ValueError, TypeError):  # written in part
                told.append(Ending(*json.loads(line)))
        return min(told, key=lambda ending: ending.consequence, default=None)


class RunBoards:
    """The boards of a run on this machine, of workers that start, run, restart or have ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self._boards: dict[int, tuple[int, Board]] = {}
        self._gone: set[int] = set()
        self._end = EndReader(folder)

    def look(self) -> RunUpdate:
        """Return what is new, without waiting."""
        with suppress(OSError):  # the run has ended
            (self.folder / WATCHED).touch()
        records = self._open_new()
        boards = {worker: board for worker, (_, board) in sorted(self._boards.items())}
        update = RunUpdate(
            headers={worker: board.header for worker, board in boards.items()},
            records=records,
            now_ns=time.perf_counter_ns(),
        )
        lives = {}
        for worker, board in boards.items():
            update.records += board.records()
            update.listings |= {(worker, count): listing for count, listing in board.listings.items()}
            lives[worker] = board.live()
            process = run_folders.state_of(board.header["process"])
            if lives[worker].state is State.LEFT or process in ("", "Z", "X"):
                self._gone.add(worker)
            elif process == "T" and "stacks_signal" in board.header:  # not of a mirror's process
                lives[worker] = lives[worker]._replace(state=State.STOPPED)
        update.lives = lives
        update.gone = frozenset(self._gone)
        update.clock_error_ms = max((board.header.get("clock_error_ms", 0.0) for board in boards.values()), default=0.0)
        update.dropped = sum(board.dropped for board in boards.values())
        update.ending = self._end.read() or self._deaths(boards, lives)
        return update

    def _deaths(self, boards: Mapping[int, Board], lives: Mapping[int, Live]) -> Ending | None:
        """Return how the run ended if all workers have gone, and some died in the middle of a step."""
        if not boards or not self._gone.issuperset(boards):
            return None
        amid = State.RUNNING, State.WAITING, State.STOPPED
        died = [f"worker {w} ended while {lives[w]}" for w in boards if lives[w].state in amid]
        return Ending(RUN_FAILED, "; ".join(died)) if died else None

    @property
    def over(self) -> bool:
        """Whether nothing new will come."""
        if not self._boards:
            return self.folder not in running()
        # While the launcher lives, it may report the cause or restart the workers.
        return self._gone.issuperset(self._boards) and not run_folders.has_launcher(self.folder)

    def stacks(self, worker: int) -> str:
        """Return the stack of a worker's computing thread, which its process writes on a signal; "" if it cannot.

        The signal's handler does nothing else, and what it interrupts goes on.
        """
        header = self._boards[worker][1].header
        number = header["process"].partition("/")[0]
        file = self.folder / f"stacks-{number}"
        try:
            before = file.stat().st_size  # the file exists, so the handler is installed
            if not run_folders.alive(header["process"]) or run_folders.state_of(header["process"]) == "?":
                return ""  # another process may have its number now
            os.kill(int(number), header["stacks_signal"])
            deadline = time.monotonic() + _STACKS_S
            while file.stat().st_size == before and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.05)  # the rest of it
            blocks = file.read_bytes()[before:].decode(errors="replace").split("\n\n")
        except (OSError, KeyError):  # gone, or on another machine
            return ""
        computing = f"{self._boards[worker][1].live().thread:#018x}"
        return "\n\n".join(block.strip() for block in blocks if computing in block)

    def _open_new(self) -> list[StepRecord]:
        """Open boards that are new or replaced, by longer ones or those of a process's next pipeline.

        Return what was still to be read of the others.
        """
        rest: list[StepRecord] = []
        for worker, file in board_files(self.folder).items():
            try:
                inode, before = file.stat().st_ino, self._boards.get(worker)
                if before is not None and before[0] == inode:
                    continue
                board = Board(file)
                if before is not None and before[1].header == board.header:
                    rest += before[1].records()
                    board = Board(file, after=before[1])
                else:  # the worker's earlier pipeline is forgotten
                    self._gone.discard(worker)
                self._boards[worker] = inode, board
            except (OSError, *DAMAGED):  # just removed, or of another version
                continue
        return rest


def board_files(path: Path) -> dict[int, Path]:
    """Return the files of boards in a run's folder, by worker."""
    return {int(file.name[7:]): file for file in sorted(path.glob("worker-*")) if file.name[7:].isdecimal()}


def read_boards(path: Path) -> dict[int, Board]:
    """Return the boards in a run's folder, by worker."""
    found = {}
    for worker, file in sorted(board_files(path).items()):
        with suppress(OSError, *DAMAGED):  # just removed, or of another version
            found[worker] = Board(file)
    return found


def running() -> Iterator[Path]:
    """Yield the folders of the runs on this machine, the newest first."""
    for path in sorted(run_folders.root().iterdir(), key=lambda path: -path.stat().st_mtime):
        if not path.name.startswith(run_folders.SOCKETS) and any(map(run_folders.alive, run_folders.processes(path))):
            yield path


def find(address: str | None) -> Path:
    """Return the folder of the run that `address` names: its script, folder or a process id; None: the only run.

    Raises:
        ConfigError: no run, or several, have this name.
    """
    there = list(running())
    if address is None:
        if not there:
            raise ConfigError("watch: no run found on this machine; start one, or name a recording, such as run.jsonl")
        if len(there) > 1:
            raise ConfigError(f"watch: {len(there)} runs are going on; name one of {', '.join(map(_shown, there))}")
        return there[0]
    for path in there:
        numbers = {process.partition("/")[0] for process in run_folders.processes(path)}
        if address in numbers or address == path.name or Path(address) == path:
            return path
    named = [
        path
        for path in there
        if Path(address).name in {board.header.get("script") for board in read_boards(path).values()}
    ]
    if len(named) == 1:
        return named[0]
    if named:
        many = f"{len(named)} runs of it are going on"
        raise ConfigError(f"watch {address}: {many}; name one of {', '.join(map(_shown, named))}")
    known = f"running are {', '.join(map(_shown, there))}" if there else "none is running on this machine"
    raise ConfigError(f"watch {address}: there is no such run; {known}")


def _shown(path: Path) -> str:
    headers = [board.header for board in read_boards(path).values()]
    if not headers:
        return f"{path.name} (starting)"
    first = headers[0]
    since = time.strftime("%H:%M:%S", time.localtime(first["started"]))
    return f"{path.name} ({first.get('script', '')} since {since}, {first['schedule']} on {len(headers)} workers)"
