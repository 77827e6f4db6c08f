"""A worker's side towards the launcher.

The launcher's leash ends the worker when the launcher is gone; what the worker tells goes to the launcher.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from ..tracing.own_boards import keep_boards
from ..tracing.training import Training

logger = logging.getLogger(__name__)

#: environment variables: descriptor to write messages to, descriptor to read orders from
TELL, LEASH = "RPC_PIPE_TELL", "RPC_PIPE_LEASH"
#: an order of the launcher: finish the step and stop
STOP = b"s"


class Attachable(Training, Protocol):
    """A training that the launcher can stop."""

    def request_stop(self) -> None:
        """Ask all workers to stop after the step that runs now."""


_lock = threading.Lock()
_pipelines: WeakSet[Attachable] = WeakSet()
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
            for pipeline in list(_pipelines):
                pipeline.request_stop()
    os._exit(1)  # the launcher is gone, however it went


def attach(pipeline: Attachable) -> None:
    """Pass the launcher's orders on to `pipeline` and let watchers see what its workers do."""
    _pipelines.add(pipeline)
    if _stop_requested:
        pipeline.request_stop()
    try:
        keep_boards(pipeline)
    except Exception as error:  # nothing depends on being watched
        logger.warning("this run cannot be watched: %s: %s", type(error).__name__, error)
