"""Boards of workers on other machines, pulled over RPC futures while somebody watches here.

    machine A                                       machine B
    watcher ──touches──> `watched`                  worker 3 ──writes──> its board
            ──reads───> worker 3's mirror <──pulls── `exhibit` reads it

The first worker of each machine keeps the mirrors. It pulls at its leisure, one question to a worker at a time, and not
at all when nobody has looked for a while; what a slow link does not carry in time is left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from . import run_folders
from .board import Board, BoardWriter, pack_live, pack_record, packed_size, unpack_live, unpack_record

logger = logging.getLogger(__name__)

#: touched by whoever looks; older than so many seconds: nobody does
WATCHED, _FRESH_S = "watched", 5.0
_PULL_EVERY_S = 0.5
#: clocks drift; so often they are compared again
_COMPARE_EVERY_S = 60.0
#: a message has so many steps at most: the latest
_MOST_STEPS = 8


class _Answer(Protocol):
    """A future, as of RPC."""

    def done(self) -> bool: ...
    def value(self) -> Any: ...


@runtime_checkable
class RemoteBoards(Protocol):
    """A carrier through which other machines' boards can be seen."""

    worker: int
    num_workers: int
    #: answers who looks at this worker: (version seen last, or -1 for everything) -> bytes
    exhibit: Callable[[int], bytes] | None

    def look(self, peer: int, seen: int) -> _Answer:
        """Ask `peer` for what `exhibit` says there."""

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Return (peer's clock minus ours, error), in ns."""


def exhibit(folder: Path, worker: int) -> Callable[[int], bytes]:
    """Return what answers those who look at `worker` from elsewhere: what is new on its board."""
    board = Board(folder / f"worker-{worker}")

    def answer(seen: int) -> bytes:
        versions = board.since(max(0, seen))[-_MOST_STEPS:]
        head: dict[str, Any] = {
            "seen": versions[-1][0] if versions else max(0, seen),
            "clock_ns": board.header["clock_ns"],
        }
        if seen < 0:
            plan = json.loads((folder / f"plan-{worker}").read_text())
            head |= {"header": board.header, "sizes": board.sizes, "plan": plan}
        encoded = json.dumps(head).encode()
        records = b"".join(pack_record(record) for _, record in versions)
        return len(encoded).to_bytes(8, "little") + encoded + pack_live(board.live()) + records

    return answer


class Mirror(threading.Thread):
    """Keeps copies of the boards of workers on other machines in `folder`, while somebody looks there."""

    def __init__(self, carrier: RemoteBoards, folder: Path, remote: list[int]) -> None:
        super().__init__(name="mirror", daemon=True)
        self._folder = folder
        self._images = [_Image(carrier, folder, peer) for peer in remote]

    def run(self) -> None:
        while True:
            time.sleep(_PULL_EVERY_S)
            if _is_watched(self._folder):
                for image in self._images:
                    try:
                        image.refresh()
                    except Exception as error:  # the others can still be shown
                        logger.warning("worker %d cannot be shown here: %s", image.peer, error)
                        self._images = [other for other in self._images if other is not image]


def _is_watched(folder: Path) -> bool:
    try:
        return time.time() < (folder / WATCHED).stat().st_mtime + _FRESH_S
    except OSError:
        return False


class _Image:
    """A copy of one worker's board, its times put to this machine's clock."""

    def __init__(self, carrier: RemoteBoards, folder: Path, peer: int) -> None:
        self._carrier = carrier
        self._folder = folder
        self.peer = peer
        self._asked: _Answer | None = None
        self._seen = -1
        self._clock_ns = -1
        self._writer: BoardWriter | None = None
        self._offset_ns, self._error_ns = 0, 0
        self._compared = 0.0

    def refresh(self) -> None:
        """Take in the last answer, if there is one, and ask again."""
        if self._asked is not None:
            if not self._asked.done():
                return
            asked, self._asked = self._asked, None
            with contextlib.suppress(RuntimeError):  # the peer has left, or does not show itself yet
                self._take(asked.value())
        with contextlib.suppress(RuntimeError):
            if time.monotonic() > self._compared + _COMPARE_EVERY_S or not self._compared:
                offset, self._error_ns = self._carrier.clock_offset(self.peer)
                self._offset_ns, self._compared = -offset, time.monotonic()
            self._asked = self._carrier.look(self.peer, self._seen)

    def _take(self, answer: bytes) -> None:
        if not answer:
            return
        at = 8 + int.from_bytes(answer[:8], "little")
        head = json.loads(answer[8:at])
        if "header" not in head and head["clock_ns"] != self._clock_ns:  # the peer has made another pipeline
            self._seen = -1
            return
        if "header" in head:
            self._clock_ns = head["clock_ns"]
            run_folders.write_program(self._folder, self.peer, head["plan"])
            self._writer = BoardWriter(
                self._folder / f"worker-{self.peer}", self._header(head["header"]), *head["sizes"]
            )
        assert self._writer is not None
        live, at = unpack_live(answer, at)
        while at < len(answer):
            size = packed_size(answer, at)
            self._writer.step_finished(unpack_record(answer[at : at + size], self._offset_ns))
            at += size
        self._writer.show(live._replace(since_ns=live.since_ns + self._offset_ns))
        self._seen = head["seen"]

    def _header(self, header: dict[str, Any]) -> dict[str, Any]:
        # The process that keeps the copy is the one that a watcher here can see; its stacks are not the worker's.
        own = {key: value for key, value in header.items() if key != "stacks_signal"}
        return {**own, "process": run_folders.identity(), "clock_error_ms": self._error_ns / 1e6}
