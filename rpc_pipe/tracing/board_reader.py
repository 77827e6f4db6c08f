"""The readers of workers' boards, see `board.py`: of a file in shared memory, or of a worker's messages."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..dependency import Action, Kind
from ..workers.hooks import Arrived, Record, StepRecord
from .board import HEAD, MAGIC, NONE, File, Live, State

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
        found: list[StepRecord] = []
        self.evaluations = []
        read = self._since(self._seen)
        if not read.startswith(MAGIC):
            return found
        for line in read[HEAD.size :].splitlines():
            with suppress(ValueError):  # there was no room for all of it
                event = json.loads(line)
                if event["kind"] == "header":
                    self._begin(event, found)
                else:
                    self._take(event, found)
        self.live = unpack_live(read[: HEAD.size], self.header.get("offset_ns", 0))
        return found

    def _begin(self, header: dict[str, Any], found: list[StepRecord]) -> None:
        Kind.learn(header.get("kinds", ()))  # before actions of these kinds are decoded
        if self.header.get("clock_ns") != header.get("clock_ns"):  # the process has made another pipeline
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
        file = File(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe, say
            raise OSError(f"{self._path} is not a regular file")
        self._file = file
        self._at = HEAD.size

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
    if before != behind:  # the worker stood still while it wrote this
        return Live()
    whom = None if peer == NONE else peer
    return Live(State(state), step, _action(action), _action(missing), whom, since_ns + offset_ns, thread)


def decode_record(read: dict[str, Any], offset_ns: int = 0) -> StepRecord:
    """Return a step that was written, with `offset_ns` added to its times."""
    times = {name: read[name] + offset_ns for name in ("start_ns", "end_ns")}
    parts: dict[str, Any] = {
        "loss": float(read["loss"]),
        **{name: float(read[name]) for name in ("grad_norm", "learning_rate") if read.get(name) is not None},
        "microbatch_order": tuple(read.get("microbatch_order", ())),
        "actions": [Record(_parsed(name), start + offset_ns, end + offset_ns) for name, start, end in read["actions"]],
        "arrivals": [Arrived(_parsed(name), peer, size, at + offset_ns) for name, peer, size, at in read["arrivals"]],
    }
    found = {**read, **times, **parts}
    # Another version has other fields.
    return StepRecord(**{name: value for name, value in found.items() if name in _FIELDS})


_parsed = lru_cache(maxsize=2**14)(Action.parse)
_FIELDS = {each.name for each in fields(StepRecord)}


def _action(code: int) -> Action | None:
    return None if code == NONE else Action(code >> 32 & 0xFFFF, Kind.of(chr(code >> 48)), code & 0xFFFFFFFF)
