"""How workers of several hosts meet: their launchers pass records on (see `hosts.py`)."""

import time
from collections.abc import Callable

from ..workers.transport.meeting import Meeting
from . import launcher_link as link
from .epochs import LEAVES_WORD, word_came, words

#: seconds between looks whether a wait for a record is cancelled
_LOOK_EVERY_S = 0.05


class HostsMeeting(Meeting):
    """Records by name, which launchers pass on to the workers of all hosts.

    Args:
        place: distinguishes the records of one place from another's.
        cancelled: raises an error when no record can arrive any more; None: it can.
    """

    def __init__(self, place: str, cancelled: Callable[[], None] | None) -> None:
        self._place, self._cancelled = place, cancelled or (lambda: None)

    def leave(self, name: str, word: str) -> None:
        link.tell(kind=LEAVES_WORD, name=f"{self._place} {name}", word=word)

    def take(self, name: str, timeout_s: float) -> str:
        named, deadline = f"{self._place} {name}", time.monotonic() + timeout_s
        with word_came:
            while named not in words:
                self._cancelled()
                if not word_came.wait(_LOOK_EVERY_S) and time.monotonic() > deadline:
                    raise TimeoutError(f"no worker has told {named}")
            return words[named]
