"""A worker's board: a file in shared memory with its state and its events, which any number of watchers read.

    worker ──writes──> head     its current action, in fixed places
                       lines    its events, one JSON object a line: a header, programs and steps
           watchers <──read──

It takes no message, lock or thread, so watching does not disturb a worker. A file that has grown long is replaced by
one with the same header and programs and the latest steps; a slow reader misses steps. The file outlives its worker, so
the launcher can report a dead worker's last action.

    {"kind": "header", ...}                                constant properties
    {"kind": "program", "number": 1, ...}                  `own_boards.list_program` for the most microbatches so far
    {"kind": "step", "number": 2, "record": {...}}         a step as it ran; times in ns of the worker's clock
    {"kind": "evaluation", "number": 3, "step": 1, ...}    a held-out loss after that number of steps

The head is overwritten again and again, with a number before and behind it: a head that is read twice alike, with
equal numbers, is whole.
"""

import json
import math
import mmap
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from enum import IntEnum
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import Action
from ..workers.hooks import Blocked, Listener, StepRecord

#: the files in a run's folder: boards of this machine's processes, and copies of other machines', by process
OWN, COPY = "worker-", "copy-"
MAGIC = b"rpc-pipe board 7"
#: magic, number, state, step, action, awaited name, its worker, start of the wait, thread that computes, number
HEAD = struct.Struct("<16s7qQq")
#: a file with more bytes of steps is replaced by one with the latest half
MOST_BYTES = 2**20

#: in place of the number of the event seen last: everything is wanted
EVERYTHING = 0
#: most steps in a message; the latest are sent
MOST_SENT = 16
#: seconds that worker 0 waits for the end of the last step everywhere, and for answers
COLLECT_S = 2.0
NONE = -1
ProgramLister = Callable[[int], "dict[str, Any] | None"]


class State(IntEnum):
    """The state of a worker."""

    STARTING = 0
    RUNNING = 1
    WAITING = 2
    #: between two steps: the next has not been called
    BETWEEN = 3
    LEFT = 4
    #: by a signal, as Ctrl-Z sends it; set by readers
    STOPPED = 5


def named(rank: int, members: int) -> str:
    """Return the name of a process.

    >>> named(3, 1), named(3, 2)
    ('worker 3', 'process 3 (member 1 of worker 1)')
    """
    return f"worker {rank}" if members == 1 else f"process {rank} (member {rank % members} of worker {rank // members})"


class Live(NamedTuple):
    """The state of a worker at a moment."""

    state: State = State.STARTING
    step: int = 0
    #: the running action, or the next one, which waits
    action: Action | None = None
    #: the action that it waits for, and that action's worker
    missing: Action | None = None
    peer: int | None = None
    #: `perf_counter_ns` of the worker's machine
    since_ns: int = 0
    #: `threading.get_ident` of the thread that computes
    thread: int = 0

    def __str__(self) -> str:
        return self.told()

    def told(self, members: int = 1) -> str:
        """Return the state in words, with the number of a member if workers have several `members`."""
        who = "a worker" if self.peer is None else named(self.peer, members)
        waits = f"waiting for {self.missing} of {who} to run {self.action}, step {self.step}"
        return {
            State.RUNNING: f"running {self.action}, step {self.step}",
            State.WAITING: f"waiting for the result of step {self.step}" if self.missing is None else waits,
            State.BETWEEN: f"between steps, after step {self.step}",
            State.STOPPED: f"stopped by a signal, step {self.step}",
            State.LEFT: "leaving",
        }.get(self.state, "starting up")


class File(FileIO):
    """A file that is closed when it is no longer referenced."""

    def __del__(self) -> None:
        self.close()


class BoardWriter(Listener):
    """Writes a worker's board.

    Args:
        path: None: only this process can read the board.
        header: constant properties, for JSON.
        list_program: returns the listing of this worker's program for a number of microbatches; None: it cannot.
        rank: returns the number of the process that stands for a worker.
        written: number of events that this process has written before, on the board of an earlier pipeline.
    """

    def __init__(
        self,
        path: Path | None,
        header: dict[str, Any],
        list_program: ProgramLister,
        rank: Callable[[int], int] = int,
        written: int = 0,
    ) -> None:
        self.path, self.header = path, header
        self._list_program, self._rank = list_program, rank
        #: returns the place of a worker in records
        self._row: Callable[[int], int] = int
        #: number of events, with the events that did not fit
        self.written = written
        #: first events of a new file, by number: the listing of the program, and the latest steps
        self._program: dict[int, bytes] = {}
        self._most_listed = 0
        #: the last step, while it has not been written
        self._ended: StepRecord | None = None
        #: kept apart, since a large number of evaluations would crowd out the steps
        self._steps, self._evaluations = dict[int, bytes](), dict[int, bytes]()
        self._bytes = self._version = 0
        self._head: mmap.mmap | bytearray = bytearray(HEAD.size)
        self._file: File | None = None
        self._write(State.STARTING, 0)
        self._begin()
        self._list(header["microbatches"])

    def _begin(self) -> None:
        """Make a file with the kept events, in place of the one before.

        Raises:
            OSError: there is no memory for it.
        """
        if self.path is None:
            return
        hidden = self.path.with_name(f"{self.path.name}.new")
        # The head is written before it is mapped: writing a mapped page without free memory kills the process.
        hidden.write_bytes(self.since(EVERYTHING, max(len(self._steps), len(self._evaluations))))
        file = File(hidden, "a+")
        head = mmap.mmap(file.fileno(), HEAD.size)
        hidden.replace(self.path)
        self._file, self._head = file, head

    def action_started(self, step: int, action: Action) -> None:
        self._write(State.RUNNING, step, _code(action))

    def waiting(self, step: int, what: Callable[[], Blocked]) -> None:
        blocked, about = what(), tuple[int, ...]()
        if blocked.action is not None and blocked.missing:
            need = blocked.missing[0]
            about = _code(blocked.action), _code(need.action), self._rank(need.worker)
        self._write(State.WAITING, step, *about)
        if self._ended is not None:
            self.write_out()

    def step_finished(self, record: StepRecord) -> None:
        # Peers wait for the next step's first payloads, so the event is written when this worker waits.
        self.write_out()
        self._ended = record

    def write_out(self) -> None:
        """Write the last step if that has not been done."""
        record, self._ended = self._ended, None
        if record is None:
            return
        if resumed := record.step > 1 and not self._steps:
            self.header["first_step"] = record.step
        self._list(record.num_microbatches)
        self._keep(self._steps, resumed, kind="step", record=encode_record(record, self._row))

    def evaluated(self, step: int, loss: float) -> None:
        self._keep(self._evaluations, kind="evaluation", step=step, loss=number_or_word(loss))

    def _keep(self, kept: dict[int, bytes], has_new_header: bool = False, **event: Any) -> None:
        """Append an event; a new file replaces one that is too large, or has an old header."""
        self._bytes += len(self._put(kept, **event))
        if self._bytes > MOST_BYTES or has_new_header:
            for each in self._evaluations, self._steps:
                while self._bytes > MOST_BYTES // 2 and len(each) > 2:
                    self._bytes -= len(each.pop(next(iter(each))))
            with suppress(OSError):
                self._begin()

    def _list(self, num_microbatches: int) -> None:
        """List the program unless it is part of the listed one."""
        if num_microbatches > self._most_listed and (listing := self._list_program(num_microbatches)) is not None:
            self._most_listed, self._program = num_microbatches, {}
            self._put(self._program, kind="program", **listing)

    def _put(self, kept: dict[int, bytes], **event: Any) -> bytes:
        """Append an event; if there is no room for it, readers see that its number is missing."""
        self.written += 1
        kept[self.written] = line = json_line(number=self.written, **event)
        if self._file is not None:
            with suppress(OSError):
                self._file.write(line)
        return line

    def idle(self, step: int) -> None:
        self._write(State.BETWEEN, step)

    def close(self) -> None:
        """Record that the worker has left."""
        self.write_out()
        self._write(State.LEFT, 0)

    def renew(self, header: dict[str, Any], row: Callable[[int], int]) -> None:
        """Begin anew without the steps of before; `row`: returns the place of a worker in records."""
        self.write_out()
        self.header = header | {name: self.header[name] for name in ("started", "clock_ns")}
        self._row, self._steps, self._program, self._most_listed = row, {}, {}, 0
        with suppress(OSError):  # training does not depend on being watched
            self._begin()
        self._list(header["microbatches"])

    def detach(self) -> None:
        """Give up the file to another board; its pipeline may live on until Python collects it."""
        self.path, self._file, self._head = None, None, bytearray(self._head)

    def since(self, seen: int, most: int = MOST_SENT) -> bytes:
        """Return the head, the header, and the events after number `seen`, of each kind the latest `most`."""
        # The training thread writes other events meanwhile.
        latest = [each for kept in (self._steps, self._evaluations) for each in list(kept.copy().items())[-most:]]
        new = [line for number, line in sorted((*self._program.items(), *latest)) if number > seen]
        return b"".join([self._head[:], json_line(kind="header", **self.header), *new])

    def _write(self, state: State, step: int, action: int = NONE, missing: int = NONE, peer: int = NONE) -> None:
        self._version = version = self._version + 1
        now, thread = time.perf_counter_ns(), threading.get_ident()
        # Not `pack_into`, which fills the head with zeros first: a process may be killed there.
        head = HEAD.pack(MAGIC, version, state, step, action, missing, peer, now, thread, version)
        self._head[: HEAD.size] = head


def encode_record(record: StepRecord, row: Callable[[int], int] = int) -> dict[str, Any]:
    """Return a step of a worker for JSON; `run_boards.decode_record` reads it. `row`: the number of a worker there."""
    return {
        **{each.name: getattr(record, each.name) for each in fields(record)},
        "worker": row(record.worker),
        "actions": [[str(r.action), r.start_ns, r.end_ns] for r in record.actions],
        "arrivals": [[str(a.action), row(a.peer), a.num_bytes, a.at_ns] for a in record.arrivals],
        **{name: number_or_word(getattr(record, name)) for name in ("loss", "grad_norm", "learning_rate")},
    }


def number_or_word(value: float | None) -> float | str | None:
    """Return a number for JSON, which has no words for "nan" and "inf"."""
    return value if value is None or math.isfinite(value) else str(value)


def json_line(**event: Any) -> bytes:
    """Return an event of a board as it is written."""
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


@lru_cache(maxsize=2**14)
def _code(action: Action) -> int:
    stage, kind, index = action
    return ord(kind.letter) << 48 | stage << 32 | index
