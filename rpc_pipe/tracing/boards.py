"""What a look at the workers of a run brings, and the boards of a run on this machine, which bring it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..workers.hooks import StepRecord
from . import run_folders
from .board import Board, Live, State
from .ending import RUN_FAILED, Ending, EndReader
from .mirror import WATCHED

#: how long a stuck worker has to write its stacks
_STACKS_S = 2.0
#: what the newest frame of our own helper threads is
_HELPERS = ("in _send_all", "in _follow")
#: what is somewhere in the stacks of those of ZeroMQ
_ZMQ = re.compile(r'transport/(zeromq\.py", line \d+ in (_hear|_watch)|keys\.py)|zmq/.*garbage\.py')


@dataclass
class News:
    """What a look at the workers has brought."""

    #: by worker, what does not change
    headers: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    #: by worker and number of microbatches, the listing of what it runs
    listings: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    lives: Mapping[int, Live] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    #: workers whose process has ended
    gone: frozenset[int] = frozenset()
    #: the workers' clock, `perf_counter_ns`
    now_ns: int = 0
    #: by how much the clocks of two workers may differ
    clock_error_ms: float = 0.0
    #: records that were overwritten before they were read
    dropped: int = 0
    #: (seconds since the epoch, what happened, whether it is a warning), of a recording
    events: list[tuple[float, str, bool]] = field(default_factory=list)
    #: how the run ended, if that was told
    ending: Ending | None = None


class NewsSource(Protocol):
    """What a watcher looks at."""

    #: where it comes from, for people
    name: str

    def look(self) -> News:
        """Return what is new; never waits."""

    @property
    def over(self) -> bool:
        """True if there will be no more news."""


class Boards:
    """The boards of a run on this machine, wherever its workers are in their lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self._boards: dict[int, tuple[int, Board]] = {}
        self._listings: dict[tuple[int, int], dict[str, Any]] = {}
        self._gone: set[int] = set()
        self._end = EndReader(folder)
        self._end.read()  # from here on it has the file open

    def look(self) -> News:
        with contextlib.suppress(OSError):  # the run has ended
            (self.folder / WATCHED).touch()
        self._open_new()
        boards = {worker: board for worker, (_, board) in sorted(self._boards.items())}
        news = News(
            headers={worker: board.header for worker, board in boards.items()},
            listings=self._listings,
            now_ns=time.perf_counter_ns(),
        )
        lives = {}
        for worker, board in boards.items():
            news.records += board.records()
            lives[worker] = board.live()
            process = run_folders.state_of(board.header["process"])
            if lives[worker].state is State.LEFT or process in ("", "Z", "X"):
                self._gone.add(worker)
            elif process == "T" and "stacks_signal" in board.header:  # not of a mirror's process
                lives[worker] = lives[worker]._replace(state=State.STOPPED)
        news.lives = lives
        news.gone = frozenset(self._gone)
        news.clock_error_ms = max((board.header.get("clock_error_ms", 0.0) for board in boards.values()), default=0.0)
        news.dropped = sum(board.dropped for board in boards.values())
        news.ending = self._end.read() or self._deaths(boards, lives)
        return news

    def _deaths(self, boards: Mapping[int, Board], lives: Mapping[int, Live]) -> Ending | None:
        """Return how the run ended if no worker is left, and some went in the middle of it without a word."""
        if not boards or not self._gone.issuperset(boards):
            return None
        amid = State.RUNNING, State.WAITING, State.STOPPED
        died = [f"worker {w} ended while {lives[w]}" for w in boards if lives[w].state in amid]
        return Ending(RUN_FAILED, "; ".join(died)) if died else None

    @property
    def over(self) -> bool:
        if not self._boards:
            return self.folder not in run_folders.running()
        # A launcher that is still there has a last word, or starts the workers again.
        return self._gone.issuperset(self._boards) and not run_folders.has_launcher(self.folder)

    def stacks(self, worker: int) -> str:
        """Return the Python stacks of a worker that is stuck, as its process writes them on a signal; or nothing.

        The signal's handler touches nothing else, and what it interrupts goes on.
        """
        header = self._boards[worker][1].header
        number = header["process"].partition("/")[0]
        file = self.folder / f"stacks-{number}"
        try:
            before = file.stat().st_size  # it is there, so the handler is too
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
        return "\n\n".join(block.strip() for block in blocks if _tells(block))

    def _open_new(self) -> None:
        """Open boards that are new, or that a process has replaced: by larger ones, or those of its next pipeline."""
        for file in self.folder.glob("worker-*"):
            if not file.name[7:].isdecimal():
                continue
            worker = int(file.name[7:])
            try:
                inode, before = file.stat().st_ino, self._boards.get(worker)
                if before is None or before[0] != inode:
                    self._boards[worker] = inode, Board(file)
                    self._replaced(worker, before)
            except (OSError, ValueError):  # just removed
                continue
        self._listings |= run_folders.listings(self.folder, known=self._listings)

    def _replaced(self, worker: int, before: tuple[int, Board] | None) -> None:
        """Go on reading a board that has only grown; forget what belongs to a worker's pipeline before this one."""
        board = self._boards[worker][1]
        if before is not None and before[1].header == board.header:
            board.follow(before[1])
            return
        self._gone.discard(worker)
        self._listings = {key: listing for key, listing in self._listings.items() if key[0] != worker}


def _tells(stack: str) -> bool:
    """Tell whether a thread's stack says what a worker is doing: not our own helpers', nor those without Python."""
    lines = stack.strip().splitlines()[1:2]
    if _ZMQ.search(stack):
        return False
    return bool(lines) and "File" in lines[0] and not any(name in lines[0] for name in _HELPERS)
