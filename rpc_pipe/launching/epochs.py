"""Epochs of an elastic job: the launcher sees processes end, and decides which take part. Loads without torch.

launcher ──"e" and a line of JSON──> worker     another epoch begins: its number and the workers without which
launcher <──"ready"── worker                    it can go on without others from here on
launcher <──"resumed"── worker                  the lowest live one: the workers go on
launcher <──"left"── worker                     it needs no other worker more
"""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..dependency import EpochEnds

if TYPE_CHECKING:
    from ..workers.transport.carrier import Carrier

#: order of the launcher: another epoch begins, with a line of JSON
EPOCH = b"e"
#: messages of a worker: it can go on without others from here on; it goes on; it has all that it needs of others
READY, RESUMED, LEFT = "ready", "resumed", "left"
#: seconds that the launcher may take to see the end of a process, which breaks connections at once
_WORD_S = 10.0


class Roster(NamedTuple):
    """The workers of an epoch, a period without a death; the first one has the number 0 and all workers."""

    number: int
    gone: frozenset[int] = frozenset()

    def order(self) -> bytes:
        """Return the launcher's line."""
        return EPOCH + json.dumps([self.number, sorted(self.gone)]).encode() + b"\n"


# --- in the launcher


class Epochs:
    """The epochs of a job, as its launcher counts them."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self.now = Roster(0)
        self._left: set[int] = set()
        #: causes of death, by worker; and the time of the last death
        self._died: dict[int, str] = {}
        self._died_at = 0.0

    def leaves(self, rank: int) -> None:
        """A worker needs no other worker any more; all have come to the end of their scripts."""
        self._left.add(rank)

    def resumes(self, step: int) -> str:
        """Return a line on the live workers, which go on with a step."""
        took_s = time.monotonic() - self._died_at
        return f"epoch {self.now.number}: goes on with step {step}, {took_s:.2f} s after the death"

    def summary(self) -> str:
        """Return a line on the workers that have died; "" if none has."""
        died = ", ".join(f"worker {rank} ({name})" for rank, name in self._died.items())
        return f"died: {died}; the figures are of the steps before" if died else ""

    def is_over(self, rank: int) -> bool:
        """Return whether the death of a worker changes nothing."""
        return rank in self._left or len(self._left | self.now.gone | {rank}) == self._num_processes

    def can_lose(self, code: int, come: Mapping[int, str]) -> bool:
        """Return whether a process that has ended with `code` was killed, in a job that can go on without it."""
        return code < 0 and list(come.values()) == [READY] * self._num_processes

    def lose(self, rank: int, code: int) -> str:
        """Begin the epoch without a worker that was killed, and without workers that have left; return a line on it."""
        self.now = Roster(self.now.number + 1, self.now.gone | {rank})
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        self._died[rank], self._died_at = name, time.monotonic()
        return f"worker {rank} is gone ({name}): epoch {self.now.number} without {sorted(self.now.gone)}"


# --- in a worker

_begun: queue.SimpleQueue[Roster] = queue.SimpleQueue()
_newest = 0


def read_order(descriptor: int, carriers: Iterable[Carrier]) -> None:
    """Read the launcher's line, and end the worker's wait. Called by the thread that reads the launcher's lines."""
    global _newest
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(descriptor, 1)):
            return
        line += more
    number, gone = json.loads(line)
    _newest = number
    _begun.put(Roster(number, frozenset(gone)))
    for carrier in carriers:
        carrier.fault(EpochEnds(f"epoch {number} begins without workers {gone}"))


def next_epoch(error: Exception) -> Roster:
    """Return the newest epoch that the launcher has begun; wait for it.

    Raises:
        Exception: `error`, if the launcher begins none: then no process has ended.
    """
    try:
        found = _begun.get(timeout=_WORD_S)
        while not _begun.empty():
            found = _begun.get()
    except queue.Empty:
        raise error from None
    return found


def refuse_old(number: int) -> None:
    """Raise EpochEnds if the launcher has begun another epoch than `number`."""
    if _newest > number:
        raise EpochEnds(f"epoch {number} ends before its workers have met")
