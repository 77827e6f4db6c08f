"""Requests for the boards of workers on other machines, and their answers. Loads without torch."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..dependency import Kind
from ..workers.hooks import StepRecord
from .board import Board, Live, pack_live, pack_record, packed_size, unpack_live, unpack_record

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
