"""The runs on this machine, found by script, folder or process, and their boards, polled for new events."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..workers.hooks import StepRecord
from . import run_folders
from .board import COPY, OWN, File, Live, State
from .board_reader import Board, BoardFile
from .run_folders import END, EVENTS, WATCHED, Ending

#: calls of a stack among which a collective is looked for
_INNERMOST = 3
#: how long a stuck worker has to write its stacks
_STACKS_S = 2.0
#: bytes of a file of endings that are read: a cause and many consequences
_MOST_END = 2**20


@dataclass
class RunUpdate:
    """What is new in a run since the last poll."""

    #: constant properties, by process
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: listing of the program, by process, for the most microbatches so far
    listings: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: present states, by process
    lives: dict[int, Live] = field(default_factory=dict)
    #: steps of workers, as their first members ran them
    records: list[StepRecord] = field(default_factory=list)
    #: (training steps before it, loss) of each evaluation
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    #: processes that have ended
    gone: frozenset[int] = frozenset()
    #: the workers' clock, `perf_counter_ns`
    now_ns: int = 0
    #: largest difference of two workers' clocks
    clock_error_ms: float = 0.0
    #: records that were overwritten before they were read
    dropped: int = 0
    #: of a recording or an elastic job's launcher: (seconds since the epoch, message, whether it is a warning)
    events: list[tuple[float, str, bool]] = field(default_factory=list)
    #: the end of the run; None: it goes on, or its end is unknown
    ending: Ending | None = None


def poll(boards: Mapping[int, Board]) -> RunUpdate:
    """Return what is new on the boards that can be read."""
    update = RunUpdate(now_ns=time.perf_counter_ns())
    for rank, board in sorted(boards.items()):
        records = board.look()
        if board.header:
            update.records += records if rank % board.header.get("members", 1) == 0 else []
            update.evaluations += board.evaluations if rank == 0 else []  # all workers have the same
            update.headers[rank] = board.header
            update.listings |= {} if board.listing is None else {rank: board.listing}
            update.lives[rank] = board.live
            update.clock_error_ms = max(update.clock_error_ms, board.header.get("clock_error_ms", 0.0))
            update.dropped += board.dropped
    return update


class RunBoards:
    """The boards of a run on this machine, of workers that start, run, restart or have ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self._boards: dict[int, Board] = {}
        self._latest = RunUpdate()
        #: from the first poll on
        self._end: File | None = None
        self._events_read = 0

    def look(self) -> RunUpdate:
        """Return what is new, without waiting."""
        with suppress(OSError):  # the run has ended
            (self.folder / WATCHED).touch()
        open_boards(self.folder, self._boards)
        self._latest = update = poll(self._boards)
        gone = set()
        for worker, header in update.headers.items():
            process = run_folders.state_of(header["process"])
            if update.lives[worker].state is State.LEFT or process in ("", "Z", "X"):
                gone.add(worker)
            elif process == "T" and "stacks_signal" in header:  # not of a mirror's process
                update.lives[worker] = update.lives[worker]._replace(state=State.STOPPED)
        update.gone = frozenset(gone)
        update.ending = self._read_end()
        with suppress(OSError):  # there are none
            told = (self.folder / EVENTS).read_text().splitlines()
            update.events += [tuple(json.loads(line)) for line in told[self._events_read :]]
            self._events_read = len(told)
        return update

    def _read_end(self) -> Ending | None:
        """Return the first cause of the end, if one was reported, even if the folder has been removed."""
        with suppress(OSError):  # it has been removed
            self._end = File(os.open(self.folder / END, os.O_RDWR | os.O_CREAT, 0o600))
        told = []
        for line in os.pread(self._end.fileno(), _MOST_END, 0).splitlines() if self._end is not None else []:
            with suppress(ValueError, TypeError):  # written in part
                told.append(Ending(*json.loads(line)))
        return min(told, key=lambda ending: ending.consequence, default=None)

    @property
    def over(self) -> bool:
        """Whether nothing new will come."""
        # While the launcher lives, it may report the cause or restart the workers.
        return not run_folders.in_use(self.folder)

    def hanging(self, culprit: int | None, running: Sequence[int]) -> tuple[int | None, list[str]]:
        """Return the process that hangs, and lines with its stack.

        Args:
            culprit: the process at the end of the chain of waits.
            running: the processes that run an action, of workers with members: one in a collective waits for another.
        """
        found = {rank: self.stacks(rank) for rank in [culprit, *running]}
        if running:
            culprit = next((rank for rank, lines in found.items() if lines and not _in_collective(lines)), culprit)
        return culprit, found[culprit]

    def stacks(self, worker: int | None) -> list[str]:
        """Return lines with the stack of a worker's computing thread, which its process writes on a signal, if it can.

        The signal's handler does nothing else, and interrupted calls go on.
        """
        header = {} if worker is None else self._latest.headers[worker]
        number = header.get("process", "").partition("/")[0]
        file = self.folder / f"stacks-{number}"
        # Another process may have its number now, and a worker of another machine has no signal.
        if worker is None or "stacks_signal" not in header or run_folders.state_of(header["process"]) in ("", "?"):
            return []
        with suppress(OSError):  # it has gone, or the handler is not installed
            before = file.stat().st_size
            os.kill(int(number), header["stacks_signal"])
            deadline = time.monotonic() + _STACKS_S
            while file.stat().st_size == before and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.05)  # the rest of it
            if file.stat().st_size == before:
                return []
            blocks = file.read_bytes()[before:].decode(errors="replace").split("\n\n")
            computing = f"{self._latest.lives[worker].thread:#018x}"
            found = [f"  {line}" for block in blocks if computing in block for line in block.strip().splitlines()]
            return [f"stacks of worker {worker}, most recent call first:", *found] if found else []
        return []


def _in_collective(stack: Sequence[str]) -> bool:
    """Return whether a process is in a collective of torch, by its innermost calls."""
    return any("/torch/distributed/" in line for line in [line for line in stack if "File " in line][:_INNERMOST])


def open_boards(folder: Path, boards: dict[int, Board], *prefixes: str) -> dict[int, Board]:
    """Add readers of the boards in a run's folder that are not open, by process, and return all."""
    for prefix in prefixes or (OWN, COPY):
        for file in folder.glob(f"{prefix}*"):
            with suppress(OSError, ValueError):  # just removed, or not in place yet
                if (rank := int(file.name.removeprefix(prefix))) not in boards:
                    boards[rank] = Board(BoardFile(file).since)
    return boards


def headers_in(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the constant properties of the boards in a run's folder, by process."""
    return poll(open_boards(folder, {})).headers


def running() -> Iterator[Path]:
    """Yield the folders of the runs on this machine, the newest first."""
    for path in sorted(run_folders.root().iterdir(), key=lambda path: -path.stat().st_mtime):
        if not path.name.startswith(run_folders.SOCKETS) and run_folders.in_use(path):
            yield path


def find(address: str | None) -> Path:
    """Return the folder of the run that `address` names: its script, folder or a process id; None: the only run.

    Raises:
        ConfigError: no run, or several, have this name.
    """
    there = list(running())
    named = [path for path in there if address is None or {address, Path(address).name} & _names(path)]
    if len(named) == 1:
        return named[0]
    typed = "watch" if address is None else f"watch {address}"
    if named:
        raise ConfigError(f"{typed}: {len(named)} runs are going on; name one of {', '.join(map(_shown, named))}")
    if address is None:
        raise ConfigError("watch: no run found on this machine; start one, or name a recording, such as run.jsonl")
    known = f"running are {', '.join(map(_shown, there))}" if there else "none is running on this machine"
    raise ConfigError(f"{typed}: there is no such run; {known}")


def _names(path: Path) -> set[str]:
    """Return the names of a run."""
    scripts = (header.get("script", "") for header in headers_in(path).values())
    return {path.name, str(path), *scripts, *(process.partition("/")[0] for process in run_folders.processes(path))}


def _shown(path: Path) -> str:
    headers = list(headers_in(path).values())
    if not headers:
        return f"{path.name} (starting)"
    first = headers[0]
    since = time.strftime("%H:%M:%S", time.localtime(first["started"]))
    return f"{path.name} ({first.get('script', '')} since {since}, {first['schedule']} on {len(headers)} workers)"
