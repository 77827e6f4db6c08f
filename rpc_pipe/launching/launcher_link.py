"""A worker's side towards the launcher.

One socket carries the launcher's orders and the worker's messages; its end means that the launcher is gone.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import ref

from ..boards.own_boards import Watchable, tell_failure

#: a function of a `View`, lines to add, and `told_layout`: whether its layout has been printed
Summarise = Callable[..., "dict[str, Any] | None"]

#: environment variable: descriptor of the socket for messages to the launcher, and for its orders
LINK = "RPC_PIPE_LINK"
#: environment variable: the folder of this attempt, which the launcher removes
FOLDER = "RPC_PIPE_FOLDER"
#: environment variable: the reaction to a loss that is not finite
NAN = "RPC_PIPE_NAN"
NANS = "stop", "warn", "ignore"


_lock = threading.Lock()
#: copying a list is atomic, also while another thread appends; a lock could deadlock in a signal handler
_attached: list[ref[Watchable]] = []
_stop_requested = False
_concluded = _failed = False
_instead: Callable[[dict[str, Any]], None] | None = None


@cache
def own_end() -> int:
    """Return the descriptor of the socket to the launcher; -1: there is no launcher.

    It is cached before the script runs, which may clear the environment.
    """
    return int(os.environ.get(LINK, -1))


def present() -> bool:
    """Return whether there is a launcher."""
    return own_end() >= 0


def tell(**message: Any) -> None:
    """Send a message to the launcher or its substitute; without one print its text."""
    global _concluded, _failed
    _concluded |= message["kind"] == "result"
    _failed |= message["kind"] in ("failure", "wrong input")
    if present():
        with suppress(OSError), _lock, open(own_end(), "w", closefd=False) as pipe:
            pipe.write(json.dumps(message) + "\n")
            return
    elif message["kind"] in ("failure", "wrong input"):
        tell_failure(message["text"], consequence=message.get("error") in ("PeerLost", "NotMet"))
    if not present() and _instead is not None:
        _instead(message)
    elif "text" in message:  # on a failure the launcher shows a worker's last printed lines
        print(message["text"], file=sys.stderr)


def tell_instead(handler: Callable[[dict[str, Any]], None]) -> None:
    """Pass the messages of this process to `handler` if there is no launcher, as under torchrun."""
    global _instead
    _instead = handler


def request_stop() -> None:
    """Ask the pipelines of this process to stop after the same step as all others."""
    global _stop_requested
    _stop_requested = True
    for pipeline in pipelines():
        pipeline.request_stop()


def pipelines() -> list[Watchable]:
    """Return the attached pipelines that are still alive."""
    return [pipeline for attached in _attached.copy() if (pipeline := attached()) is not None]


def concluded() -> bool:
    """Return whether the summary has been reported."""
    return _concluded


def failed() -> bool:
    """Return whether the cause of the end has been reported."""
    return _failed


def stopping() -> bool:
    """Return whether this process has been asked to stop."""
    return _stop_requested or any(pipeline.stopped for pipeline in pipelines())


def add(pipeline: Watchable) -> None:
    """Pass the launcher's orders to `pipeline`."""
    if all(each is not pipeline for each in pipelines()):
        _attached.append(ref(pipeline, _attached.remove))
    if _stop_requested:
        pipeline.request_stop()
