"""Messages between the launchers of several hosts: JSON in small frames, and nothing else. Loads without torch.

Any holder of the job's key may send them. So they are read as data of known types, and any other message ends the job
by a sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from ..dependency import ConfigError, PipeError
from .worker_process import WorkerEvent

#: a stranger may send one frame before it has proved the key, so frames are small; encryption adds less than that
_FRAME_BYTES = 2**14
MOST_FRAME_BYTES = 2 * _FRAME_BYTES
#: actions of a worker's process, and the words of its launcher
_DETAILS = {"printed": str, "ended": int, "told": dict}
#: errors of reading that a message of other types causes
_UNREADABLE = LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, StopIteration


class _Told(msgspec.Struct):
    """A message of a worker to the launcher: each kind has some of these fields."""

    kind: str
    text: str = ""
    error: str = ""
    goes: str = ""
    name: str = ""
    word: str = ""
    step: int = 0
    live: int = 0
    placed: int = 0
    peer: int = 0
    exit_code: int = 0
    stages: list[int] = []
    places: list[int] = []
    json: dict[str, Any] = {}


def frames_of(message: Sequence[Any]) -> list[bytes]:
    """Return a message as it travels."""
    text = json.dumps(message).encode()
    return [text[at : at + _FRAME_BYTES] for at in range(0, len(text), _FRAME_BYTES)]


@contextmanager
def understood(who: str) -> Iterator[None]:
    """Return a context to read, or follow, a message of the launcher with the name `who`.

    Raises:
        ConfigError: it is none that a launcher of this version sends.
    """
    try:
        yield
    except PipeError:
        raise
    except _UNREADABLE as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"--meet: {who} sends what no launcher of this version does ({why})") from error


def read(frames: Sequence[bytes], who: str) -> list[Any]:
    """Return a message of the launcher with this name.

    Raises:
        ConfigError: it is none.
    """
    with understood(who):
        return msgspec.convert(json.loads(b"".join(frames)), list[Any])


def event_of(rank: int, what: str, detail: Any) -> WorkerEvent:
    """Return an event of a worker of another host.

    Raises:
        ValueError, TypeError, LookupError: it is none.
    """
    msgspec.convert(detail, _DETAILS[what])
    if what == "told":
        msgspec.convert(detail, _Told)
    return WorkerEvent(what, rank, detail)


def write_journal(journal: int, at: int, data: str) -> int:
    """Write a part of a journal that a launcher has sent; return where it ends.

    Raises:
        ValueError, TypeError: it does not follow the present end.
    """
    if journal < 0 or not 0 <= at <= os.fstat(journal).st_size:
        raise ValueError(f"a journal that begins at {at}")
    return at + os.pwrite(journal, bytes.fromhex(data), at)
