"""Nothing lost and nothing twice to one peer, over connections that break and come back. No socket, thread or clock.

What is said is numbered and kept until the peer says that it has it. A connection keeps the order of what it carries
and loses only what is under way when it breaks. So whoever sees a number that is not the next one asks for all from
there on again (go-back-N); numbers that were there before are dropped. A peer that is silent is told the last number,
which shows it a gap at the end.

    numbered   1 2 3 ──x  4        the connection broke with 3 under way
    again      <── from 3 on       asked once; what was still on its way does not make it ask twice
    numbered   3 4
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

#: so much may have arrived before the peer is told of it alone, if nothing else is said to it
_UNTOLD, _UNTOLD_BYTES = 32, 4 * 2**20


class Said(NamedTuple):
    """What goes with everything that is said."""

    #: of what is said; in a tick, of what was said last
    number: int
    #: everything up to this number has arrived
    arrived: int
    #: how many requests to say it again have been followed
    followed: int


class Delivery:
    """One worker's end of what it and one peer say to each other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, Any]] = deque()
        self._said = 0
        self._followed = 0
        self._arrived = 0
        self._told = 0
        self._untold_bytes = 0
        #: requests to say it again: made, and known to have been followed
        self._asked = self._answered = 0

    def say(self, content: Any) -> Said:
        """Number `content`, and keep it until it has arrived."""
        with self._lock:
            self._said += 1
            self._kept.append((self._said, content))
            return self._now()

    def tick(self) -> Said:
        """Return what to tell a silent peer."""
        with self._lock:
            return self._now()

    def take(self, said: Said, num_bytes: int = 0) -> bool:
        """Note what came with something of the peer. Return whether it is the next of what it says, so to be read."""
        with self._lock:
            self._note(said)
            if said.number != self._arrived + 1:
                return False
            self._arrived += 1
            self._untold_bytes += num_bytes
            return True

    def ticked(self, said: Said) -> None:
        """Note what came with a tick."""
        with self._lock:
            self._note(said)

    def gap(self, said: Said) -> int | None:
        """Return the number of a request to say everything again that has not arrived; None: no other is needed.

        Called with what came out of turn, or with a tick.
        """
        with self._lock:
            if said.number <= self._arrived or self._asked > self._answered:
                return None
            self._asked += 1
            return self._asked

    @property
    def unanswered(self) -> int | None:
        """The number of a request that has not been followed, and may have been lost; following it twice is once."""
        return self._asked if self._asked > self._answered else None

    def again(self, request: int, arrived: int) -> list[tuple[Said, Any]]:
        """Return all to be said again for a request of the peer, which has everything up to `arrived`."""
        with self._lock:
            self._free(arrived)
            if request <= self._followed:
                return []
            self._followed = request
            return [(self._now(number), content) for number, content in self._kept]

    @property
    def is_open(self) -> bool:
        """Whether something of ours may not have arrived, or the peer does not know that its own has."""
        return bool(self._kept) or self._told < self._arrived or self._asked > self._answered

    @property
    def owes(self) -> bool:
        """Whether so much has arrived that the peer is to be told now."""
        return self._arrived - self._told >= _UNTOLD or self._untold_bytes >= _UNTOLD_BYTES

    def _now(self, number: int | None = None) -> Said:
        self._told, self._untold_bytes = self._arrived, 0
        return Said(self._said if number is None else number, self._arrived, self._followed)

    def _note(self, said: Said) -> None:
        self._free(said.arrived)
        self._answered = max(self._answered, min(said.followed, self._asked))

    def _free(self, arrived: int) -> None:
        while self._kept and self._kept[0][0] <= arrived:
            self._kept.popleft()
