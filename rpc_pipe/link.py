"""A worker's side of the launcher: what it tells, and the leash that ends it when the launcher is gone.

Without a launcher there is no leash and no board.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .dependency import Action

if TYPE_CHECKING:
    from .pipeline import Pipeline

#: environment variables: descriptor to write messages to, descriptor to read orders from, the board's path
TELL, LEASH, BOARD = "RPC_PIPE_TELL", "RPC_PIPE_LEASH", "RPC_PIPE_BOARD"
#: bytes a worker has on the board: ns computing and ns in all of the last step, length of text, text
BOARD_ENTRY = 160
_TEXT_AT = 18
#: an order of the launcher: finish the step and stop
STOP = b"s"

_lock = threading.Lock()
_pipelines: list[Pipeline] = []
_stop_requested = False
_instead: Callable[[dict[str, Any]], None] | None = None


def present() -> bool:
    """Tell whether a launcher is there."""
    return TELL in os.environ


def tell(**message: Any) -> None:
    """Send a message to the launcher, or to who took its place in this process."""
    if present():
        with _lock, open(int(os.environ[TELL]), "w", closefd=False) as pipe:
            pipe.write(json.dumps(message) + "\n")
    elif _instead is not None:
        _instead(message)


def tell_instead(handler: Callable[[dict[str, Any]], None]) -> None:
    """Without a launcher, as under torchrun, let `handler` have the messages of this process."""
    global _instead
    _instead = handler


def hold_leash() -> None:
    """Watch the launcher from a thread: do as it orders, and end at once when it is gone."""
    if LEASH in os.environ:
        threading.Thread(target=_follow, args=(int(os.environ[LEASH]),), name="leash", daemon=True).start()


def _follow(descriptor: int) -> None:
    global _stop_requested
    while order := os.read(descriptor, 1):
        if order == STOP:
            _stop_requested = True
            for pipeline in _pipelines:
                pipeline.request_stop()
    os._exit(1)  # the launcher is gone, however it went


def attach(pipeline: Pipeline) -> None:
    """Pass the launcher's orders on to `pipeline` and write its workers' state on the board."""
    from .workers.hooks import Listener, StepRecord  # here, so that the launcher loads without torch

    _pipelines.append(pipeline)
    if _stop_requested:
        pipeline.request_stop()
    path = os.environ.get(BOARD)
    if path is None:
        return
    with open(path, "r+b") as file:
        board = mmap.mmap(file.fileno(), 0)

    class Board(Listener):
        """Keeps what each worker does where the launcher can read it after the worker's death."""

        def __init__(self, worker: int) -> None:
            self._at = worker * BOARD_ENTRY

        def action_started(self, step: int, action: Action) -> None:
            self._write(f"running {action}, step {step}")

        def waiting(self, step: int, what: Callable[[], str]) -> None:
            self._write(f"waiting for {what()}, step {step}")

        def step_finished(self, record: StepRecord) -> None:
            struct.pack_into("<QQ", board, self._at, record.busy_ns, record.end_ns - record.start_ns)
            self._write(f"between steps, after step {record.step}")

        def _write(self, text: str) -> None:
            encoded = text.encode()[: BOARD_ENTRY - _TEXT_AT]
            struct.pack_into(f"<H{len(encoded)}s", board, self._at + 16, len(encoded), encoded)

    pipeline.listen(Board)


def read_board(path: str, num_workers: int) -> list[tuple[str, int, int]]:
    """Return of each worker what it did last, and the ns computing and in all of its last step."""
    with open(path, "rb") as file:
        board = file.read()
    found = []
    for worker in range(num_workers):
        busy_ns, step_ns, length = struct.unpack_from("<QQH", board, worker * BOARD_ENTRY)
        start = worker * BOARD_ENTRY + _TEXT_AT
        text = board[start : start + length].decode(errors="replace")
        found.append((text or "starting up", busy_ns, step_ns))
    return found
