"""Boards of workers on other machines: requested at the end of a run, and copied while a watcher reads.

    machine A                                       machine B
    watcher ──touches──> `watched`                  worker 3 ──writes──> its board
            ──reads───> a copy of it   <──asks for── `serve_board` answers with its bytes

Worker 0 collects the last steps of all workers. The first worker of each machine keeps the copies. It asks one worker
after the other, and none without a watcher; events that a slow link does not deliver in time are omitted.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from . import run_folders
from .board import COLLECT_S, COPY, EVERYTHING, HEAD, MOST_BYTES, OWN, json_line
from .run_boards import Board, open_boards, poll
from .run_folders import WATCHED
from .view import View

if TYPE_CHECKING:
    from ..workers.transport.carrier import Carrier

#: seconds between two looks
_PAUSE_S = 0.01
#: a mark older than this many seconds means that there is no watcher
_FRESH_S = 5.0
_PULL_EVERY_S = 0.5
#: how often clocks are compared again, as they drift
_COMPARE_EVERY_S = 60.0


class Peer:
    """A worker in another process; the carrier requests its board."""

    def __init__(self, carrier: Carrier, worker: int) -> None:
        self._carrier, self.worker = carrier, worker
        self._clock, self._compared = (0, 0), -math.inf

    def since(self, seen: int) -> bytes:
        """Return `BoardWriter.since` of its board, in this machine's clock and as if this process wrote it.

        The answer is empty if it has left, or does not answer in time.
        """
        try:
            if time.monotonic() > self._compared + _COMPARE_EVERY_S:
                self._clock, self._compared = self._carrier.clock_offset(self.worker), time.monotonic()
            answer = self._carrier.look(self.worker, seen).result(COLLECT_S)
        except (RuntimeError, futures.TimeoutError):
            return b""
        header, _, events = answer[HEAD.size :].partition(b"\n")
        if not header:
            return b""  # it does not show itself yet
        offset_ns, error_ns = self._clock
        own = {"process": run_folders.identity(), "offset_ns": -offset_ns, "clock_error_ms": error_ns / 1e6}
        # A watcher here can see this process; the stacks here are not the worker's.
        kept = {key: value for key, value in json.loads(header).items() if key != "stacks_signal"}
        return answer[: HEAD.size] + json_line(**kept | own) + events


def collected(own: Mapping[int, Callable[[int], bytes]], folder: Path | None, carrier: Carrier | None) -> View:
    """Return the last steps of all workers.

    Args:
        own: `since` of the boards of this process's workers, by process.
        folder: of the other workers' boards, if a launcher keeps them.
        carrier: to workers with boards that cannot be read here.
    """
    deadline = time.monotonic() + COLLECT_S
    boards = {} if folder is None else open_boards(folder, {}, OWN)
    boards |= {rank: Board(since) for rank, since in own.items()}
    if carrier is not None:
        ranks = {carrier.plane.rank(worker): worker for worker in carrier.workers}
        boards |= {rank: Board(Peer(carrier, worker).since) for rank, worker in ranks.items() if rank not in boards}
    view, update = View(), poll(boards)
    here = {update.headers[rank]["worker"] for rank in own}
    last = max((record.step for record in update.records if record.worker in here), default=-1)
    while True:
        view.take(update)
        # The last step may not have ended on the other workers.
        if [last] == view.complete_steps(1) or last < 0 or time.monotonic() > deadline:
            return view
        time.sleep(_PAUSE_S)
        update = poll(boards)


class Mirror(threading.Thread):
    """A thread that keeps copies of other machines' boards in `folder` while a watcher reads there."""

    def __init__(self, carrier: Carrier, folder: Path, remote: Iterable[int]) -> None:
        super().__init__(name="mirror", daemon=True)
        self._watched = folder / WATCHED
        self._copies = [Copy(Peer(carrier, each), folder / f"{COPY}{carrier.plane.rank(each)}") for each in remote]

    def run(self) -> None:
        while True:
            time.sleep(_PULL_EVERY_S)
            for copy in self._copies:
                with suppress(OSError):  # there was no watcher yet, or there is no memory for it
                    if time.time() < self._watched.stat().st_mtime + _FRESH_S:
                        copy.refresh()


class Copy:
    """A copy of one worker's board."""

    def __init__(self, peer: Peer, path: Path) -> None:
        self._peer, self._path, self._seen = peer, path, EVERYTHING

    def refresh(self) -> None:
        """Write what is new."""
        if not (answer := self._peer.since(self._seen)):
            return
        if self._seen == EVERYTHING:
            hidden = self._path.with_name(f"{self._path.name}.new")
            hidden.write_bytes(answer)
            hidden.replace(self._path)
        else:
            with self._path.open("r+b") as file:
                file.write(answer[: HEAD.size])
                file.seek(0, os.SEEK_END)
                file.write(answer[HEAD.size :])
        self._seen = json.loads(answer[HEAD.size :].splitlines()[-1]).get("number", self._seen)
        if self._path.stat().st_size > MOST_BYTES:
            self._seen = EVERYTHING
