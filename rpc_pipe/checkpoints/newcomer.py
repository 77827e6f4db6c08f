"""A newcomer in an elastic job: its script begins at the top, and takes up the state of a live replica.

The results of the job's calls lie in a journal. The newcomer makes the calls of its script once more beside training,
and gets their results from there. Where there are no more, it takes part: it has the state of a worker after that step.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from .resumption import Resumption

_RECORD = struct.Struct("<qdd")
_PAUSE_S = 0.005


class CallResult(NamedTuple):
    """The result of a call: of a training step its loss and norm."""

    #: negative: minus the number of bytes of an evaluation, which follow
    step: int
    value: float
    beside: float


class Journal:
    """The results of a job's training steps and evaluations, in a file of this host.

    All workers make the same calls, and write the same entries at the same places. So a death leaves no gap.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._at = 0

    def write(self, step: int, value: float, beside: float | None) -> None:
        """Write the next entry."""
        entry = _RECORD.pack(step, value, math.nan if beside is None else beside)
        os.pwrite(self._file, entry, self._at)
        self._at += _RECORD.size

    def write_evaluation(self, found: Mapping[str, tuple[float, float]]) -> None:
        """Write the values of an evaluation as the next entry."""
        text = json.dumps(found).encode()
        self._at += os.pwrite(self._file, _RECORD.pack(-len(text), 0.0, 0.0) + text, self._at)

    def evaluation(self, size: int) -> dict[str, tuple[float, float]] | None:
        """Return the values in the next entry, of `size` bytes, and move behind it; None: it is not complete yet."""
        text = os.pread(self._file, size, self._at + _RECORD.size)
        if len(text) < size:
            return None
        self._at += _RECORD.size + size
        return {name: (value, weight) for name, (value, weight) in json.loads(text).items()}

    def read(self) -> CallResult | None:
        """Return the next entry; None: there is none yet."""
        found = os.pread(self._file, _RECORD.size, self._at)
        return CallResult(*_RECORD.unpack(found)) if len(found) == _RECORD.size else None

    def advance(self) -> None:
        """Go behind the next entry."""
        self._at += _RECORD.size


class Repetition(Resumption):
    """The calls of a newcomer's script until it takes part.

    Args:
        take_part: called when there is no entry; lets the process take part, if the time has come, and returns whether.
        look: called while an entry is awaited.
    """

    def __init__(self, journal: Journal, take_part: Callable[[], bool], look: Callable[[], None]) -> None:
        super().__init__()
        self._journal, self._take_part, self._look = journal, take_part, look
        self._replays = True

    @property
    def behind(self) -> bool:
        return self._replays

    def skip_step(self, batch: str, rows: int = 0) -> float:
        self._asked += 1
        entry = self._next()
        while entry.step <= 0:  # the script has left out an evaluation
            self.evaluated()
            entry = self._next()
        if entry.step > self._asked:  # an earlier step than the checkpoint that the job resumed from
            return math.nan
        self._journal.advance()
        norm = None if math.isnan(entry.beside) else entry.beside
        self.note_step(entry.value, batch, norm, rows)
        while self._journal.read() is None:
            if self._take_part():
                self._replays = False
                break
            self._wait()
        return entry.value

    def evaluated(self) -> dict[str, tuple[float, float]]:
        entry = self._next()
        if entry.step > 0:
            return super().evaluated()
        while (found := self._journal.evaluation(-entry.step)) is None:
            self._wait()
        return found

    def _next(self) -> CallResult:
        while (entry := self._journal.read()) is None:
            self._wait()
        return entry

    def _wait(self) -> None:
        self._look()
        time.sleep(_PAUSE_S)
