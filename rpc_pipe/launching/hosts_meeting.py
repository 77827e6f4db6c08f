"""How workers of several hosts meet: their launchers pass records on (see `hosts.py`)."""

from __future__ import annotations

from collections.abc import Callable

from ..workers.transport.meeting import Meeting
from . import launcher_link as link
from .epochs import LEAVES_WORD, word


class HostsMeeting(Meeting):
    """Records by name, which launchers pass on to the workers of all hosts.

    Args:
        place: distinguishes the records of one place from another's.
        cancelled: raises an error when no record can come any more; None: it can.
    """

    def __init__(self, place: str, cancelled: Callable[[], None] | None) -> None:
        self._place, self._cancelled = place, cancelled or (lambda: None)

    def leave(self, name: str, word: str) -> None:
        link.tell(kind=LEAVES_WORD, name=f"{self._place} {name}", word=word)

    def take(self, name: str, timeout_s: float) -> str:
        return word(f"{self._place} {name}", timeout_s, self._cancelled)
