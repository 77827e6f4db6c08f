"""A worker's board: a file in shared memory with its state and its events, which any number of watchers read.

    worker ──writes──> head     what it does now, in fixed places
                       lines    its events, one JSON object a line: a header, programs and steps
           watchers <──read──

It takes no message, lock or thread, so watching does not disturb a worker. A file that has grown long is replaced by
one with the same header and programs and the latest steps; a slow reader misses steps. The file outlives its worker, so
the launcher can tell what a dead worker was doing.

    {"kind": "header", ...}                                constant properties
    {"kind": "program", "number": 1, ...}                  the listing of a program (`own_boards.list_program`)
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

from ..dependency import Action
from ..workers.hooks import Blocked, Listener, StepRecord

MAGIC = b"rpc-pipe board 6"
#: magic, number, state, step, action, what is waited for, of whom, since when, thread that computes, number
HEAD = struct.Struct("<16s7qQq")
LINES_AT = HEAD.size
#: a file with more steps, or more bytes of them, is replaced by one with the latest half
MOST_STEPS, _MOST_BYTES = 512, 2**20

#: in place of the number of the event seen last: everything is wanted; nothing will be asked any more
EVERYTHING, NO_MORE = 0, -2
#: most steps in a message; the latest are sent
MOST_SENT = 16
#: seconds that worker 0 waits for the end of the last step everywhere, and for answers
COLLECT_S = 2.0
NONE = -1


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
        self.path = path
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
        hidden = None if self.path is None else self.path.with_name(self.path.name + ".new")
        made = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = File(os.memfd_create("board") if hidden is None else os.open(hidden, made, 0o600))
        try:
            # Writing to a mapped page that cannot be allocated kills the process.
            os.posix_fallocate(file.number, 0, LINES_AT)
            file.append(b"".join([_line(kind="header", **self.header), *self._lines.values()]))
            head = mmap.mmap(file.number, LINES_AT)
            head[:] = self._head[:]
            if hidden is not None and self.path is not None:
                hidden.replace(self.path)
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
        HEAD.pack_into(self._head, 0, *HEAD.unpack(pack_live(live, self._version)))

    def _write(self, state: State, step: int, action: int = NONE, missing: int = NONE, peer: int = NONE) -> None:
        self._version = version = self._version + 1
        now, thread = time.perf_counter_ns(), threading.get_ident()
        HEAD.pack_into(self._head, 0, MAGIC, version, state, step, action, missing, peer, now, thread, version)


def pack_live(live: Live, number: int) -> bytes:
    """Encode the head of a board; `board_reader.unpack_live` decodes it."""
    codes = [NONE if action is None else _code(action) for action in (live.action, live.missing)]
    peer = NONE if live.peer is None else live.peer
    return HEAD.pack(MAGIC, number, live.state, live.step, *codes, peer, live.since_ns, live.thread, number)


def encode_record(record: StepRecord) -> dict[str, Any]:
    """Return a step of a worker for JSON; `board_reader.decode_record` reads it."""
    return {
        **{each.name: getattr(record, each.name) for each in fields(record)},
        "actions": [[str(r.action), r.start_ns, r.end_ns] for r in record.actions],
        "arrivals": [[str(a.action), a.peer, a.num_bytes, a.at_ns] for a in record.arrivals],
        "loss": number_or_word(record.loss),
    }


def number_or_word(value: float) -> float | str:
    """JSON has no word for what is not finite: "nan", "inf"."""
    return value if math.isfinite(value) else str(value)


def _line(**event: Any) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


@lru_cache(maxsize=2**14)
def _code(action: Action) -> int:
    stage, kind, index = action
    return ord(kind.letter) << 48 | stage << 32 | index
