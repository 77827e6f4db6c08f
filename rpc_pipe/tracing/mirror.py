"""Mirrors of the boards of workers on other machines, pulled through the carrier while somebody watches here.

    machine A                                       machine B
    watcher ──touches──> `watched`                  worker 3 ──writes──> its board
            ──reads───> worker 3's mirror <──pulls── `serve_board` shows it

The first worker of each machine keeps the mirrors. It has at most one request to each worker in flight, and none while
nobody watches; what a slow link does not deliver in time is left out.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent import futures
from pathlib import Path

from . import run_folders
from .board import LINES_AT, BoardWriter
from .board_reader import Events, unpack_live
from .remote_boards import EVERYTHING, RemoteBoards
from .run_folders import WATCHED

logger = logging.getLogger(__name__)

#: if that is older than this many seconds, nobody watches
_FRESH_S = 5.0
_PULL_EVERY_S = 0.5
#: how often clocks are compared again, as they drift
_COMPARE_EVERY_S = 60.0


class Mirror(threading.Thread):
    """A thread that keeps copies of other machines' boards in `folder` while somebody watches there."""

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
    """A copy of one worker's board, in this machine's clock."""

    def __init__(self, carrier: RemoteBoards, folder: Path, peer: int) -> None:
        self._carrier = carrier
        self._folder = folder
        self.peer = peer
        self._asked: futures.Future[bytes] | None = None
        self._events = Events()
        self._listed: set[int] = set()
        self._writer: BoardWriter | None = None
        self._offset_ns, self._error_ns = 0, 0
        self._compared = 0.0

    def refresh(self) -> None:
        """Write the last answer, if it has come, and send the next request."""
        if self._asked is not None:
            if not self._asked.done():
                return
            asked, self._asked = self._asked, None
            with contextlib.suppress(RuntimeError):  # the peer has left, or does not show itself yet
                self._take(asked.result())
        with contextlib.suppress(RuntimeError):
            if time.monotonic() > self._compared + _COMPARE_EVERY_S or not self._compared:
                offset, self._error_ns = self._carrier.clock_offset(self.peer)
                self._offset_ns, self._compared = -offset, time.monotonic()
            self._asked = self._carrier.look(self.peer, self._events.seen)

    def _take(self, answer: bytes) -> None:
        if not answer:
            return
        seen, made = self._events.seen, self._events.header.get("clock_ns")
        records = self._events.read(answer[LINES_AT:], self._offset_ns)
        if self._writer is None or self._events.header["clock_ns"] != made:
            if seen != EVERYTHING:  # it has made another pipeline
                self._events = Events()
                return
            # The process that keeps the copy is the one a watcher here can see; its stacks are not the worker's.
            own = {key: value for key, value in self._events.header.items() if key != "stacks_signal"}
            own |= {"process": run_folders.identity(), "clock_error_ms": self._error_ns / 1e6}
            self._writer, self._listed = BoardWriter(self._folder / f"worker-{self.peer}", own), set()
        for count, listing in self._events.listings.items():
            if count not in self._listed:
                self._listed.add(count)
                self._writer.list_program(listing)
        for record in records:
            self._writer.step_finished(record)
        self._writer.show(unpack_live(answer[:LINES_AT], self._offset_ns))
