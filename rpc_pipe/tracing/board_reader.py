"""The reader of a worker's board, see `board.py`."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..dependency import Action, Kind
from ..workers.hooks import Arrived, Record, StepRecord
from .board import HEAD, LINES_AT, MAGIC, NONE, File, Live, State

#: how often a state that is being written is read again
_TRIES = 20


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
        if self._file.read(0, len(MAGIC)) == MAGIC:
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
            _, before, *_, behind = HEAD.unpack(head)
            if before == behind and head == self._file.read(0, LINES_AT):
                return unpack_live(head)
        return Live()


def unpack_live(head: bytes, offset_ns: int = 0) -> Live:
    """Decode a head and add `offset_ns` to its time."""
    _, _, state, step, action, missing, peer, since_ns, thread, _ = HEAD.unpack(head)
    whom = None if peer == NONE else peer
    return Live(State(state), step, _action(action), _action(missing), whom, since_ns + offset_ns, thread)


def decode_record(read: dict[str, Any], offset_ns: int = 0) -> StepRecord:
    """Return a step that was written, with `offset_ns` added to its times."""
    times = {name: read[name] + offset_ns for name in ("start_ns", "end_ns")}
    parts: dict[str, Any] = {
        "loss": float(read["loss"]),
        "actions": [Record(_parsed(name), start + offset_ns, end + offset_ns) for name, start, end in read["actions"]],
        "arrivals": [Arrived(_parsed(name), peer, size, at + offset_ns) for name, peer, size, at in read["arrivals"]],
    }
    found = {**read, **times, **parts}
    return StepRecord(**{name: value for name, value in found.items() if name in _FIELDS})  # another version has others


_parsed = lru_cache(maxsize=2**14)(Action.parse)
_FIELDS = {each.name for each in fields(StepRecord)}


def _action(code: int) -> Action | None:
    return None if code == NONE else Action(code >> 32 & 0xFFFF, Kind.of(chr(code >> 48)), code & 0xFFFFFFFF)
