"""A worker's board: a file in shared memory with its state and last steps, which any number of watchers map and read.

    worker ──writes──> header   constant properties, as JSON
                       live     what it does now
                       slots    its last steps, a ring buffer
           watchers <──read──

It takes no message, lock or thread, so watching does not disturb a worker; a slow reader misses steps. When a step does
not fit into a slot, a file with larger slots and the same steps replaces the old one. The file outlives its worker, so
the launcher can tell what a dead worker was doing.

Live and slots are seqlocks: they begin with a version, which is 0 while they are written; a reader that finds it
changed after copying copies again. Memory fences keep the order on weakly ordered processors. All numbers are 64-bit.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import Action, Kind
from ..workers.hooks import Arrived, Blocked, LayerTime, Listener, Record, StepRecord
from ..workers.transport.ordered import X86, keep_order

_MAGIC = b"rpc-pipe board 5"
#: magic, length of the header, number of slots, bytes of a slot
_START = struct.Struct("<16s3q")
_HEADER_BYTES = 8192
_VERSION = struct.Struct("<q")
#: state, step, action, what is waited for, of whom, since when, thread that computes
_LIVE = struct.Struct("<6qQ")
_SLOTS_AT = _HEADER_BYTES + 64
#: of a record: worker, step, start, end, rows, tokens, peak bytes, outbox, microbatches, loss, how many actions,
#: arrivals, layers, how long data were waited for and why, how often preempted
_FIXED = struct.Struct("<9qd3q3q")
_CAUSES = ("", "disk", "network", "decode")
#: approximate memory of a worker's slots, and bounds of their number
_SLOTS_BYTES, _LEAST_SLOTS, MOST_SLOTS = 2**20, 4, 512
_TRIES = 20

_NONE = -1


class State(IntEnum):
    """The state of a worker."""

    STARTING = 0
    RUNNING = 1
    WAITING = 2
    #: between two steps: the next has not been called
    BETWEEN = 3
    LEFT = 4
    #: by a signal, as Ctrl-Z sends it; set by readers
    STOPPED = 5


class Live(NamedTuple):
    """What a worker does at a moment."""

    state: State = State.STARTING
    step: int = 0
    #: the running action, or the next one, which waits
    action: Action | None = None
    #: the action that it waits for, and that action's worker
    missing: Action | None = None
    peer: int | None = None
    #: `perf_counter_ns` of the worker's machine
    since_ns: int = 0
    #: `threading.get_ident` of the thread that computes
    thread: int = 0

    def __str__(self) -> str:
        if self.state is State.RUNNING:
            return f"running {self.action}, step {self.step}"
        if self.state is State.WAITING and self.missing is None:
            return f"waiting for the result of step {self.step}"
        if self.state is State.WAITING:
            return f"waiting for {self.missing} of worker {self.peer} to run {self.action}, step {self.step}"
        if self.state is State.BETWEEN:
            return f"between steps, after step {self.step}"
        if self.state is State.STOPPED:
            return f"stopped by a signal, step {self.step}"
        return "leaving" if self.state is State.LEFT else "starting up"


class BoardWriter(Listener):
    """Writes a worker's board.

    Args:
        path: None: memory that this process alone can read.
        header: constant properties, for JSON; at most 8 kB.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._path = path
        self._encoded = json.dumps(header).encode()
        if _START.size + len(self._encoded) > _HEADER_BYTES:
            raise ValueError(f"header of {len(self._encoded)} bytes: at most {_HEADER_BYTES - _START.size}")
        self._version = 0
        #: number of steps written
        self.written = 0
        self._make(_SLOTS_BYTES // MOST_SLOTS)
        self._write(State.STARTING, 0)
        self._show()

    def _make(self, slot_bytes: int) -> None:
        """Allocate a board with slots of this size, invisible to readers until `_show`."""
        num_slots = max(_LEAST_SLOTS, min(MOST_SLOTS, _SLOTS_BYTES // slot_bytes))
        size = _SLOTS_AT + num_slots * slot_bytes
        if self._path is None:
            made = mmap.mmap(-1, size)
        else:
            made = _reserved(self._hidden(self._path), size)
        _START.pack_into(made, 0, _MAGIC, len(self._encoded), num_slots, slot_bytes)
        made[_START.size : _START.size + len(self._encoded)] = self._encoded
        self._map, self._num_slots, self._slot_bytes = made, num_slots, slot_bytes

    @staticmethod
    def _hidden(path: Path) -> Path:
        return path.with_name(path.name + ".new")

    def _show(self) -> None:
        """Make the complete board visible to readers."""
        if self._path is not None:
            self._hidden(self._path).replace(self._path)
        #: a reader of this board
        self.board = Board(self._map)

    def action_started(self, step: int, action: Action) -> None:
        self._write(State.RUNNING, step, _code(action))

    def waiting(self, step: int, what: Callable[[], Blocked]) -> None:
        blocked = what()
        if blocked.action is None or not blocked.missing:
            self._write(State.WAITING, step)
        else:
            need = blocked.missing[0]
            self._write(State.WAITING, step, _code(blocked.action), _code(need.action), need.worker)

    def step_finished(self, record: StepRecord) -> None:
        packed = pack_record(record)
        self.written += 1  # even if there is no room for it, so that readers know that a step is missing
        if len(packed) + 8 > self._slot_bytes:
            try:
                self._grow(len(packed) + 8)
            except OSError:
                return
        self._put(self.written, packed)

    def _put(self, version: int, packed: bytes) -> None:
        at = _SLOTS_AT + (version % self._num_slots) * self._slot_bytes
        _VERSION.pack_into(self._map, at, 0)
        keep_order()
        self._map[at + 8 : at + 8 + len(packed)] = packed
        keep_order()
        _VERSION.pack_into(self._map, at, version)

    def _grow(self, slot_bytes: int) -> None:
        """Replace this board by one with larger slots.

        Raises:
            OSError: there is no memory for it.
        """
        live, records = self._map[_HEADER_BYTES:_SLOTS_AT], self.board.since(0)
        self._make(1 << (slot_bytes - 1).bit_length())
        self._map[_HEADER_BYTES:_SLOTS_AT] = live
        for version, record in records[-self._num_slots :]:
            self._put(version, pack_record(record))
        self._show()

    def idle(self, step: int) -> None:
        self._write(State.BETWEEN, step)

    def close(self) -> None:
        """Record that the worker has left."""
        self._write(State.LEFT, 0)

    def show(self, live: Live) -> None:
        """Write the state of another board, of which this one is a mirror."""
        at, live_bytes = self._new_version(), pack_live(live)
        self._map[at : at + len(live_bytes)] = live_bytes
        keep_order()
        _VERSION.pack_into(self._map, _HEADER_BYTES, self._version)

    def _write(self, state: State, step: int, action: int = _NONE, missing: int = _NONE, peer: int = _NONE) -> None:
        live = state, step, action, missing, peer, time.perf_counter_ns(), threading.get_ident()
        if X86:  # as below: this is done for every action
            self._version += 1
            _VERSION.pack_into(self._map, _HEADER_BYTES, 0)
            _LIVE.pack_into(self._map, _HEADER_BYTES + 8, *live)
            _VERSION.pack_into(self._map, _HEADER_BYTES, self._version)
            return
        _LIVE.pack_into(self._map, self._new_version(), *live)
        keep_order()
        _VERSION.pack_into(self._map, _HEADER_BYTES, self._version)

    def _new_version(self) -> int:
        """Invalidate the live state and return its offset; its version must be written last."""
        self._version += 1
        _VERSION.pack_into(self._map, _HEADER_BYTES, 0)
        keep_order()
        return _HEADER_BYTES + 8


class Board:
    """A reader of a worker's board.

    Args:
        board: the file, or the memory of a board.

    Raises:
        ValueError: the file is no board.
        OSError: it cannot be read.
    """

    def __init__(self, board: Path | mmap.mmap) -> None:
        self._map = _mapped(board) if isinstance(board, Path) else board
        magic, length, self._num_slots, self._slot_bytes = _START.unpack_from(self._map, 0)
        if magic != _MAGIC:
            raise ValueError(f"{board} is no board")
        #: constant properties
        self.header: dict[str, Any] = json.loads(self._map[_START.size : _START.size + length])
        Kind.learn(self.header.get("kinds", ()))  # before actions of these kinds are decoded
        self._seen = -1
        #: steps that were overwritten before they were read
        self.dropped = 0

    def follow(self, before: Board) -> None:
        """Continue behind the last step that was read of a board that this one replaces."""
        self._seen, self.dropped = before._seen, before.dropped

    def live(self) -> Live:
        """Return the worker's present, or last, state."""
        data = self._stable(_HEADER_BYTES, lambda: _LIVE.size)
        return Live() if data is None else unpack_live(data[1], 0)[0]

    def records(self) -> list[StepRecord]:
        """Return the steps finished since the last call that are not overwritten."""
        found = self.since(self._seen)
        if found:
            if self._seen >= 0:  # steps before the first call do not count as missed
                self.dropped += found[-1][0] - self._seen - len(found)
            self._seen = found[-1][0]
        return [record for _, record in found]

    def since(self, seen: int) -> list[tuple[int, StepRecord]]:
        """Return (version, step) of the steps after version `seen` that are not overwritten, in order."""
        found: list[tuple[int, StepRecord]] = []
        seen = max(0, seen)
        for slot in range(self._num_slots):
            at = _SLOTS_AT + slot * self._slot_bytes
            if _VERSION.unpack_from(self._map, at)[0] <= seen:
                continue
            data = self._stable(at, lambda at=at: packed_size(self._map, at + 8))  # type: ignore[misc]
            if data is not None and data[0] > seen:
                found.append((data[0], unpack_record(data[1])))
        return sorted(found, key=lambda pair: pair[0])

    def _stable(self, at: int, size: Callable[[], int]) -> tuple[int, bytes] | None:
        """Return (version, data), or None if the data keep being written."""
        for _ in range(_TRIES):
            version = _VERSION.unpack_from(self._map, at)[0]
            keep_order()
            data = self._map[at + 8 : at + 8 + size()] if version else b""
            keep_order()
            if version and _VERSION.unpack_from(self._map, at)[0] == version:
                return version, data
            time.sleep(1e-5)
        return None


def _reserved(path: Path, size: int) -> mmap.mmap:
    """Map a new file with allocated memory: writing to a mapped page that cannot be allocated kills the process."""
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            path.unlink()
            raise
        return mmap.mmap(file.fileno(), 0)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < _SLOTS_AT:
            raise ValueError(f"{path} is no board")
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def pack_live(live: Live) -> bytes:
    """Encode the state of a worker; `unpack_live` decodes it."""
    codes = [_NONE if action is None else _code(action) for action in (live.action, live.missing)]
    peer = _NONE if live.peer is None else live.peer
    return _LIVE.pack(live.state, live.step, *codes, peer, live.since_ns, live.thread)


def unpack_live(data: bytes, at: int) -> tuple[Live, int]:
    """Decode a state at offset `at`; return it and the offset behind it."""
    state, step, action, missing, peer, since_ns, thread = _LIVE.unpack_from(data, at)
    whom = None if peer == _NONE else peer
    live = Live(State(state), step, _action(action), _action(missing), whom, since_ns, thread)
    return live, at + _LIVE.size


def pack_record(record: StepRecord) -> bytes:
    """Encode a step of a worker; `unpack_record` decodes it."""
    words: list[int] = []
    for action, start_ns, end_ns in record.actions:
        words += (_code(action), start_ns, end_ns)
    for arrived in record.arrivals:
        words += (_code(arrived.action), arrived.peer, arrived.num_bytes, arrived.at_ns)
    for layer in record.layers:
        words += layer
    counts = len(record.actions), len(record.arrivals), len(record.layers)
    return _FIXED.pack(
        record.worker, record.step, record.start_ns, record.end_ns, record.rows, record.tokens, record.peak_bytes,
        record.outbox, record.num_microbatches, record.loss, *counts, record.data_wait_ns,
        _CAUSES.index(record.data_cause), record.preempted,
    ) + struct.pack(f"<{len(words)}q", *words)  # fmt: skip


def packed_size(data: bytes | mmap.mmap, at: int) -> int:
    """Return the bytes of the record at offset `at`."""
    *_, actions, arrivals, layers, _, _, _ = _FIXED.unpack_from(data, at)
    return int(_FIXED.size + 8 * (3 * actions + 4 * arrivals + 2 * layers))


def unpack_record(data: bytes, offset_ns: int = 0) -> StepRecord:
    """Decode a step and add `offset_ns` to its times."""
    worker, step, start_ns, end_ns, rows, tokens, peak, outbox, microbatches, loss, *counts = _FIXED.unpack_from(data)
    actions, arrivals, layers, data_wait_ns, cause, preempted = counts
    words = iter(struct.unpack_from(f"<{3 * actions + 4 * arrivals + 2 * layers}q", data, _FIXED.size))
    return StepRecord(
        worker,
        step,
        start_ns + offset_ns,
        end_ns + offset_ns,
        [Record(_named(next(words)), next(words) + offset_ns, next(words) + offset_ns) for _ in range(actions)],
        [Arrived(_named(next(words)), next(words), next(words), next(words) + offset_ns) for _ in range(arrivals)],
        [LayerTime(next(words), next(words)) for _ in range(layers)],
        loss,
        rows,
        tokens,
        peak,
        outbox,
        microbatches,
        data_wait_ns,
        _CAUSES[cause],
        preempted,
    )


@lru_cache(maxsize=2**14)
def _code(action: Action) -> int:
    stage, kind, microbatch = action
    return ord(kind.letter) << 48 | stage << 32 | microbatch


def _named(code: int) -> Action:
    return Action(code >> 32 & 0xFFFF, Kind.of(chr(code >> 48)), code & 0xFFFFFFFF)


def _action(code: int) -> Action | None:
    return None if code == _NONE else _named(code)
