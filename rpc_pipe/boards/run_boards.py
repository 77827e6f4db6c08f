"""The runs on this machine, found by script, folder or process, and the readers of their boards (`board.py`).

A board is read from a file in shared memory, or from the messages of its worker.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..dependency import Action, ConfigError, Kind
from ..workers.hooks import Arrived, Record, StepRecord
from . import run_folders
from .board import COPY, HEAD, MAGIC, NONE, OWN, File, Live, State, named
from .run_folders import END, EVENTS, WATCHED, Ending

#: how often a state that is being written is read again
_TRIES = 20


class Board:
    """The read part of a worker's board.

    Args:
        since: returns its head and the whole lines after the event of this number, if they are there.
    """

    def __init__(self, since: Callable[[int], bytes]) -> None:
        self._since = since
        #: constant properties; a board of another machine has `offset_ns`, which is added to all times
        self.header: dict[str, Any] = {}
        #: listing of the program for the most microbatches so far
        self.listing: dict[str, Any] | None = None
        #: the worker's present, or last, state
        self.live = Live()
        self.evaluations: list[tuple[int, float]] = []
        #: events that were overwritten before they were read
        self.dropped = 0
        self._seen = 0
        self._read_steps = False

    def look(self) -> list[StepRecord]:
        """Return the new steps of its latest pipeline. `evaluations` are new as well."""
        found, self.evaluations = list[StepRecord](), []
        if not (read := self._since(self._seen)).startswith(MAGIC):
            return found
        for line in read[HEAD.size :].splitlines():
            with suppress(ValueError):  # there was no room for all of it
                event = json.loads(line)
                (self._begin if event["kind"] == "header" else self._take)(event, found)
        self.live = unpack_live(read[: HEAD.size], self.header.get("offset_ns", 0))
        return found

    def _begin(self, header: dict[str, Any], found: list[StepRecord]) -> None:
        Kind.learn(header.get("kinds", ()))  # before actions of these kinds are decoded
        # The process has made another pipeline, or continues in another epoch.
        if any(self.header.get(name) != header.get(name) for name in ("clock_ns", "epoch")):
            found.clear()
            self.evaluations.clear()
            self.listing, self._seen, self._read_steps = None, 0, False
        self.header = header

    def _take(self, event: dict[str, Any], found: list[StepRecord]) -> None:
        number = event.pop("number")
        if number <= self._seen:
            return
        # Steps before the first one that is read do not count as missed.
        self.dropped += (number - self._seen - 1) * self._read_steps
        self._seen = number
        if event["kind"] == "program":
            self.listing = event
        elif event["kind"] == "evaluation":
            self.evaluations.append((event["step"], float(event["loss"])))
        else:
            self._read_steps = True
            found.append(decode_record(event["record"], self.header.get("offset_ns", 0)))


class BoardFile:
    """The file of a board, which may be replaced by another, and is read on when it has been removed.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        if not self._path.is_file():  # such as a pipe
            raise OSError(f"{self._path} is not a regular file")
        self._file, self._at = File(self._path), HEAD.size

    def since(self, seen: int) -> bytes:
        """Return the head, and the whole lines that are new since the last call."""
        lines = self._lines()
        with suppress(OSError):  # it has been removed
            if os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino:
                self._open()
                lines += self._lines()
        return self._head() + lines

    def _lines(self) -> bytes:
        there = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, self._at)
        whole = there.rfind(b"\n") + 1  # the last may be written just now
        self._at += whole
        return there[:whole]

    def _head(self) -> bytes:
        head = b""
        for _ in range(_TRIES):
            before, head = head, os.pread(self._file.fileno(), HEAD.size, 0)
            if head == before and head[len(MAGIC) :][:8] == head[-8:]:
                break
        return head


def unpack_live(head: bytes, offset_ns: int) -> Live:
    """Decode a head and add `offset_ns` to its time."""
    _, before, state, step, action, missing, peer, since_ns, thread, behind = HEAD.unpack(head)
    if before != behind or not before:  # the worker stood still, or was killed, while it wrote this
        return Live()
    whom = None if peer == NONE else peer
    return Live(State(state), step, _action(action), _action(missing), whom, since_ns + offset_ns, thread)


def decode_record(read: dict[str, Any], offset_ns: int = 0) -> StepRecord:
    """Return a step that was written, with `offset_ns` added to its times."""
    times = {name: read[name] + offset_ns for name in ("start_ns", "end_ns")}
    numbers = ("loss", "grad_norm", "learning_rate")
    parts: dict[str, Any] = {
        **{name: float(read[name]) for name in numbers if read.get(name) is not None},
        "microbatch_order": tuple(read.get("microbatch_order", ())),
        "actions": [Record(_parsed(name), start + offset_ns, end + offset_ns) for name, start, end in read["actions"]],
        "arrivals": [Arrived(_parsed(name), peer, size, at + offset_ns) for name, peer, size, at in read["arrivals"]],
    }
    return StepRecord(**{**read, **times, **parts})


_parsed = lru_cache(maxsize=2**14)(Action.parse)


def _action(code: int) -> Action | None:
    return None if code == NONE else Action(code >> 32 & 0xFFFF, Kind.of(chr(code >> 48)), code & 0xFFFFFFFF)


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
    #: of an elastic job's launcher: (seconds since the epoch, message, whether it is a warning)
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
        for worker, header in update.headers.items():
            process = run_folders.state_of(header["process"])
            if update.lives[worker].state is State.LEFT or process in ("", "Z", "X"):
                update.gone |= {worker}
            elif process == "T" and "stacks_signal" in header:  # not of a mirror's process
                update.lives[worker] = update.lives[worker]._replace(state=State.STOPPED)
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
        """Whether the boards are final."""
        # While the launcher lives, it may report the cause or restart the workers.
        return not run_folders.in_use(self.folder)

    def stacks(self, worker: int | None) -> list[str]:
        """Return lines with the stack of a worker's computing thread, which its process writes on a signal, if it can.

        The signal's handler only writes, and interrupted calls continue.
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
            lines = [line for block in blocks if computing in block for line in block.strip().splitlines()]
            # Frames behind runpy's are those of the launcher, which has started the script.
            found = [f"  {line}" for line in takewhile(lambda line: '"<frozen runpy>"' not in line, lines)]
            who = named(worker, header.get("members", 1))
            return [f"stacks of {who}, most recent call first:", *found] if found else []
        return []


def in_collective(stack: Sequence[str]) -> bool:
    """Return whether a process is in a collective of torch, by its innermost calls."""
    return "/torch/distributed/" in "".join([line for line in stack if "File " in line][:_INNERMOST])


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
    why = f"{len(named)} runs are going on; name one of {', '.join(map(_shown, named))}"
    if not named and address is None:
        why = "no run found on this machine; start one"
    elif not named:
        known = f"running are {', '.join(map(_shown, there))}" if there else "none is running on this machine"
        why = f"there is no such run; {known}"
    raise ConfigError(f"watch{'' if address is None else f' {address}'}: {why}")


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
