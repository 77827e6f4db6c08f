"""Mirrors of the boards of workers on other machines, pulled through the carrier while somebody watches here.

    machine A                                       machine B
    watcher ──touches──> `watched`                  worker 3 ──writes──> its board
            ──reads───> worker 3's mirror <──pulls── `serve_board` shows it

The first worker of each machine keeps the mirrors. It has at most one request to each worker in flight, and none while
nobody watches; what a slow link does not deliver in time is left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..dependency import Kind
from ..workers.hooks import StepRecord
from . import run_folders
from .board import Board, BoardWriter, Live, pack_live, pack_record, packed_size, unpack_live, unpack_record

logger = logging.getLogger(__name__)

#: file that watchers touch; if older than this many seconds, nobody watches
WATCHED, _FRESH_S = "watched", 5.0
_PULL_EVERY_S = 0.5
#: how often clocks are compared again, as they drift
_COMPARE_EVERY_S = 60.0
#: in place of the version seen last: everything is wanted; nothing will be asked any more
EVERYTHING, NO_MORE = -1, -2
#: most steps in a message; the latest are sent
_MOST_STEPS = 16


@runtime_checkable
class RemoteBoards(Protocol):
    """A carrier that transports boards of other machines."""

    worker: int
    num_workers: int
    #: answers requests for this worker's board: version seen last, EVERYTHING or NO_MORE -> bytes
    serve_board: Callable[[int], bytes] | None

    def look(self, peer: int, seen: int) -> futures.Future[bytes]:
        """Request the answer of `serve_board` on `peer`."""

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Return (peer's clock minus ours, error), in ns."""

    def end_calls(self) -> None:
        """Announce that this worker makes no more calls; others that wait for one get an error."""

    @property
    def failed(self) -> bool:
        """Whether this worker has reported a failure to the others."""

    @property
    def asked_in_vain(self) -> bool:
        """Whether others may wait for results of a step that this worker has abandoned."""


class BoardAnswer(NamedTuple):
    """A worker's answer about its board."""

    #: version of its latest step
    seen: int
    #: id of the worker's pipeline
    clock_ns: int
    #: numbers of microbatches with listed programs
    listed: list[int]
    #: None, without listings, if only new steps were requested
    header: dict[str, Any] | None
    listings: list[dict[str, Any]]
    live: Live
    records: list[StepRecord]


def pack_answer(board: Board, listings: Mapping[int, dict[str, Any]], seen: int) -> bytes:
    """Encode the steps of a board since version `seen`, or everything; `unpack_answer` decodes it."""
    versions = board.since(max(0, seen))[-_MOST_STEPS:]
    head: dict[str, Any] = {
        "seen": versions[-1][0] if versions else max(0, seen),
        "clock_ns": board.header["clock_ns"],
        "listed": list(listings),
        "header": board.header if seen < 0 else None,
        "listings": list(listings.values()) if seen < 0 else [],
    }
    encoded = json.dumps(head).encode()
    records = b"".join(pack_record(record) for _, record in versions)
    return len(encoded).to_bytes(8, "little") + encoded + pack_live(board.live()) + records


def unpack_answer(answer: bytes, offset_ns: int) -> BoardAnswer:
    """Decode an answer and add `offset_ns` to its times."""
    at = 8 + int.from_bytes(answer[:8], "little")
    head = json.loads(answer[8:at])
    Kind.learn((head["header"] or {}).get("kinds", ()))
    live, at = unpack_live(answer, at)
    records = []
    while at < len(answer):
        size = packed_size(answer, at)
        records.append(unpack_record(answer[at : at + size], offset_ns))
        at += size
    return BoardAnswer(**head, live=live._replace(since_ns=live.since_ns + offset_ns), records=records)


def ask_everything(carrier: RemoteBoards, peers: Sequence[int], timeout_s: float) -> list[tuple[BoardAnswer, int]]:
    """Request the boards of `peers`; return (answer in this worker's clock, clock error in ns) of each.

    Workers that have left, or do not answer in time, are left out.
    """
    clocks: dict[int, tuple[int, int]] = {}
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            clocks[peer] = carrier.clock_offset(peer)
    answers = _ask(carrier, clocks, EVERYTHING, timeout_s)
    return [(unpack_answer(packed, -clocks[peer][0]), clocks[peer][1]) for peer, packed in answers.items() if packed]


def tell_no_more(carrier: RemoteBoards, peers: Iterable[int], timeout_s: float) -> None:
    """Tell `peers` that no more requests will come."""
    _ask(carrier, peers, NO_MORE, timeout_s)


def _ask(carrier: RemoteBoards, peers: Iterable[int], seen: int, timeout_s: float) -> dict[int, bytes]:
    asked: dict[int, futures.Future[bytes]] = {}
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            asked[peer] = carrier.look(peer, seen)
    answers, deadline = {}, time.monotonic() + timeout_s
    for peer, future in asked.items():
        with contextlib.suppress(RuntimeError, futures.TimeoutError):
            answers[peer] = future.result(max(0.0, deadline - time.monotonic()))
    return answers


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
        self._seen = EVERYTHING
        self._clock_ns = -1
        self._listed: list[int] = []
        self._last_step = -1
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
            self._asked = self._carrier.look(self.peer, self._seen)

    def _take(self, packed: bytes) -> None:
        if not packed:
            return
        answer = unpack_answer(packed, self._offset_ns)
        if answer.header is not None:
            self._show(answer, answer.header)
        elif (answer.clock_ns, answer.listed) != (self._clock_ns, self._listed):
            self._seen = EVERYTHING  # it has made another pipeline, or lists more
            return
        assert self._writer is not None
        for record in answer.records:
            if record.step > self._last_step:
                self._writer.step_finished(record)
                self._last_step = record.step
        self._writer.show(answer.live)
        self._seen = answer.seen

    def _show(self, answer: BoardAnswer, header: dict[str, Any]) -> None:
        """Write the header and the listings."""
        another = answer.clock_ns != self._clock_ns
        self._clock_ns, self._listed = answer.clock_ns, answer.listed
        if another:
            run_folders.remove_listings(self._folder, self.peer)
        for listing in answer.listings:
            run_folders.write_listing(self._folder, listing)
        if another:
            # The process that keeps the copy is the one a watcher here can see; its stacks are not the worker's.
            own = {key: value for key, value in header.items() if key != "stacks_signal"}
            own |= {"process": run_folders.identity(), "clock_error_ms": self._error_ns / 1e6}
            self._writer = BoardWriter(self._folder / f"worker-{self.peer}", own)
            self._last_step = -1
