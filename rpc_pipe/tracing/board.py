"""A worker's board: a file in shared memory with its state and its events, which any number of watchers read.

    worker ──writes──> head     what it does now, in fixed places
                       lines    its events, one JSON object a line: a header, programs and steps
           watchers <──read──

It takes no message, lock or thread, so watching does not disturb a worker. A file that has grown long is replaced by
one with the same header and programs and the latest steps; a slow reader misses steps. The file outlives its worker, so
the launcher can tell what a dead worker was doing.

    {"kind": "header", ...}                                constant properties
    {"kind": "program", "number": 1, ...}                  the listing of a program, as `program_listing` writes it
    {"kind": "step", "number": 2, "record": {...}}         a step as it ran; times in ns of the worker's clock

The head is written over again and again, with a number before and behind it: what is read twice alike, with equal
numbers, is whole.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from ..dependency import Action, Kind
from ..workers.hooks import Arrived, Blocked, LayerTime, Listener, Record, StepRecord

_MAGIC = b"rpc-pipe board 6"
#: magic, number, state, step, action, what is waited for, of whom, since when, thread that computes, number
_HEAD = struct.Struct("<16s7qQq")
LINES_AT = _HEAD.size
#: a file with more steps, or more bytes of them, is replaced by one with the latest half
MOST_STEPS, _MOST_BYTES = 512, 2**20
_TRIES = 20

_NONE = -1


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


class Live(NamedTuple):
    """What a worker does at a moment."""

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
        if self.state is State.RUNNING:
            return f"running {self.action}, step {self.step}"
        if self.state is State.WAITING and self.missing is None:
            return f"waiting for the result of step {self.step}"
        if self.state is State.WAITING:
            return f"waiting for {self.missing} of worker {self.peer} to run {self.action}, step {self.step}"
        if self.state is State.BETWEEN:
            return f"between steps, after step {self.step}"
        if self.state is State.STOPPED:
            return f"stopped by a signal, step {self.step}"
        return "leaving" if self.state is State.LEFT else "starting up"


class File:
    """A board's file, closed when nobody needs it."""

    def __init__(self, number: int) -> None:
        self.number = number
        finalize(self, os.close, number)

    @property
    def size(self) -> int:
        return os.fstat(self.number).st_size

    def append(self, data: bytes) -> None:
        """Write all of `data` at the end, or nothing.

        Raises:
            OSError: there is no room for it.
        """
        size = self.size
        try:
            if os.pwrite(self.number, data, size) == len(data):
                return
        except OSError:
            pass
        os.ftruncate(self.number, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self.number, end - start, start)


class BoardWriter(Listener):
    """Writes a worker's board.

    Args:
        path: None: memory that this process alone can read.
        header: constant properties, for JSON.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._path = path
        self.header = header
        self._version = 0
        #: number of events written, also of those that there was no room for
        self.written = 0
        #: what a new file begins with, by number, and which of these are steps, with their bytes
        self._lines: dict[int, bytes] = {}
        self._steps: deque[int] = deque()
        self._bytes = 0
        live = Live(since_ns=time.perf_counter_ns(), thread=threading.get_ident())
        self._head: mmap.mmap | bytes = pack_live(live, 0)
        self._begin()

    def _begin(self) -> None:
        """Make a file with what is kept, in place of the one before.

        Raises:
            OSError: there is no memory for it.
        """
        hidden = None if self._path is None else self._path.with_name(self._path.name + ".new")
        made = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = File(os.memfd_create("board") if hidden is None else os.open(hidden, made, 0o600))
        try:
            # Writing to a mapped page that cannot be allocated kills the process.
            os.posix_fallocate(file.number, 0, LINES_AT)
            file.append(b"".join([_line(kind="header", **self.header), *self._lines.values()]))
            head = mmap.mmap(file.number, LINES_AT)
            head[:] = self._head[:]
            if hidden is not None and self._path is not None:
                hidden.replace(self._path)
        except OSError:
            if hidden is not None:
                hidden.unlink(missing_ok=True)
            raise
        #: for readers in this process
        self.file = file
        self._head = head

    def action_started(self, step: int, action: Action) -> None:
        self._write(State.RUNNING, step, _code(action))

    def waiting(self, step: int, what: Callable[[], Blocked]) -> None:
        blocked = what()
        if blocked.action is None or not blocked.missing:
            self._write(State.WAITING, step)
        else:
            need = blocked.missing[0]
            self._write(State.WAITING, step, _code(blocked.action), _code(need.action), need.worker)

    def step_finished(self, record: StepRecord) -> None:
        self._put(kind="step", number=self.written + 1, record=encode_record(record))
        self._steps.append(self.written)
        self._bytes += len(self._lines[self.written])
        if len(self._steps) > MOST_STEPS or self._bytes > _MOST_BYTES:
            while len(self._steps) > MOST_STEPS // 2 or (self._bytes > _MOST_BYTES // 2 and len(self._steps) > 2):
                self._bytes -= len(self._lines.pop(self._steps.popleft()))
            with suppress(OSError):
                self._begin()

    def list_program(self, listing: dict[str, Any]) -> None:
        """Add the listing of a program of this worker."""
        self._put(kind="program", number=self.written + 1, **listing)

    def _put(self, **event: Any) -> None:
        """Append an event; if there is no room for it, readers see that its number is missing."""
        self.written += 1
        self._lines[self.written] = line = _line(**event)
        with suppress(OSError):
            self.file.append(line)

    def idle(self, step: int) -> None:
        self._write(State.BETWEEN, step)

    def close(self) -> None:
        """Record that the worker has left."""
        self._write(State.LEFT, 0)

    def since(self, seen: int, most: int) -> bytes:
        """Return the head and the lines of the header and the events after number `seen`, at most so many steps."""
        steps, lines = list(self._steps), self._lines.copy()  # the thread that trains writes others meanwhile
        kept = steps[-most:]
        left_out = set(steps).difference(kept)
        new = [line for number, line in lines.items() if number > seen and number not in left_out]
        return b"".join([self._head[:], _line(kind="header", **self.header), *new])

    def show(self, live: Live) -> None:
        """Write the state of another board, of which this one is a mirror."""
        self._version += 1
        _HEAD.pack_into(self._head, 0, *_HEAD.unpack(pack_live(live, self._version)))

    def _write(self, state: State, step: int, action: int = _NONE, missing: int = _NONE, peer: int = _NONE) -> None:
        self._version = version = self._version + 1
        now, thread = time.perf_counter_ns(), threading.get_ident()
        _HEAD.pack_into(self._head, 0, _MAGIC, version, state, step, action, missing, peer, now, thread, version)


class Events:
    """The events of a board, as they are read.

    Args:
        after: what was read of a file that this one replaces.
    """

    def __init__(self, after: Events | None = None) -> None:
        #: constant properties
        self.header: dict[str, Any] = {}
        #: listing of the program by number of microbatches
        self.listings: dict[int, dict[str, Any]] = {}
        #: number of the latest event
        self.seen: int = 0 if after is None else after.seen
        #: events that were overwritten before they were read
        self.dropped: int = 0 if after is None else after.dropped
        self._read_steps: bool = after is not None and after._read_steps

    def read(self, lines: bytes, offset_ns: int = 0) -> list[StepRecord]:
        """Take in whole lines; return the steps that are new, with `offset_ns` added to their times."""
        found = []
        for event in map(json.loads, lines.splitlines()):
            kind, number = event.pop("kind"), event.pop("number", 0)
            if kind == "header":
                Kind.learn(event.get("kinds", ()))  # before actions of these kinds are decoded
                self.header = event
            elif kind == "program":
                self.listings[event["microbatches"]] = event
            elif number > self.seen:
                found.append(decode_record(event["record"], offset_ns))
            if number > self.seen:
                # What was before the first step that is read has not been missed.
                self.dropped += (number - self.seen - 1) * self._read_steps
                self._read_steps |= kind == "step"
                self.seen = number
        return found


class Board(Events):
    """A reader of a worker's board.

    Args:
        board: the file, or that of a writer in this process.
        after: the reader of a file that this one replaces.

    Raises:
        ValueError: the file is no board.
        OSError: it cannot be read.
    """

    def __init__(self, board: Path | File, after: Board | None = None) -> None:
        super().__init__(after)
        self._file = File(os.open(board, os.O_RDONLY | os.O_CLOEXEC)) if isinstance(board, Path) else board
        self._at = LINES_AT
        self._unasked: list[StepRecord] = []
        if self._file.read(0, len(_MAGIC)) == _MAGIC:
            self._unasked = self.records()
        if not self.header:
            raise ValueError(f"{board} is no board")

    def records(self) -> list[StepRecord]:
        """Return the steps finished since the last call that are not overwritten."""
        lines = self._file.read(self._at, self._file.size)
        whole = lines.rfind(b"\n") + 1  # the last may be written just now
        self._at += whole
        found, self._unasked = self._unasked + self.read(lines[:whole]), []
        return found

    def live(self) -> Live:
        """Return the worker's present, or last, state."""
        for _ in range(_TRIES):
            head = self._file.read(0, LINES_AT)
            _, before, *_, behind = _HEAD.unpack(head)
            if before == behind and head == self._file.read(0, LINES_AT):
                return unpack_live(head)
        return Live()


def pack_live(live: Live, number: int) -> bytes:
    """Encode the head of a board; `unpack_live` decodes it."""
    codes = [_NONE if action is None else _code(action) for action in (live.action, live.missing)]
    peer = _NONE if live.peer is None else live.peer
    return _HEAD.pack(_MAGIC, number, live.state, live.step, *codes, peer, live.since_ns, live.thread, number)


def unpack_live(head: bytes, offset_ns: int = 0) -> Live:
    """Decode a head and add `offset_ns` to its time."""
    _, _, state, step, action, missing, peer, since_ns, thread, _ = _HEAD.unpack(head)
    whom = None if peer == _NONE else peer
    return Live(State(state), step, _action(action), _action(missing), whom, since_ns + offset_ns, thread)


def encode_record(record: StepRecord) -> dict[str, Any]:
    """Return a step of a worker for JSON; `decode_record` reads it."""
    return {
        **{each.name: getattr(record, each.name) for each in fields(record)},
        "actions": [[str(r.action), r.start_ns, r.end_ns] for r in record.actions],
        "arrivals": [[str(a.action), a.peer, a.num_bytes, a.at_ns] for a in record.arrivals],
        "loss": number_or_word(record.loss),
    }


def decode_record(read: dict[str, Any], offset_ns: int = 0) -> StepRecord:
    """Return a step that was written, with `offset_ns` added to its times."""
    times = {name: read[name] + offset_ns for name in ("start_ns", "end_ns")}
    parts: dict[str, Any] = {
        "loss": float(read["loss"]),
        "actions": [Record(_parsed(name), start + offset_ns, end + offset_ns) for name, start, end in read["actions"]],
        "arrivals": [Arrived(_parsed(name), peer, size, at + offset_ns) for name, peer, size, at in read["arrivals"]],
        "layers": [LayerTime(*layer) for layer in read["layers"]],
    }
    return StepRecord(**{**read, **times, **parts})


def number_or_word(value: float) -> float | str:
    """JSON has no word for what is not finite: "nan", "inf"."""
    return value if math.isfinite(value) else str(value)


def _line(**event: Any) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


_parsed = lru_cache(maxsize=2**14)(Action.parse)


@lru_cache(maxsize=2**14)
def _code(action: Action) -> int:
    stage, kind, index = action
    return ord(kind.letter) << 48 | stage << 32 | index


def _action(code: int) -> Action | None:
    return None if code == _NONE else Action(code >> 32 & 0xFFFF, Kind.of(chr(code >> 48)), code & 0xFFFFFFFF)
