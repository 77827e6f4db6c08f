"""The reading end of payloads that stay on the writer's device until they have been copied to this one."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ...dependency import Malformed
from .form import Form
from .payload import Payload
from .ring_buffer import COPIED, DEVICE
from .ways import DeviceWay, Fetching


class FromDevice:
    """Brings payloads from a device of another process.

    Args:
        counters: the reader's, by which the writer learns what has been copied.
    """

    def __init__(self, counters: memoryview) -> None:
        self._counters = counters
        self._fetching: Fetching | None = None
        #: the events of copies that the writer has not been told
        self.copying: deque[Any] = deque()
        self._settling = threading.Lock()

    def choose(self, way: DeviceWay, page: Any) -> str:
        """Have payloads taken from the writer's device, if that works. Return how they come."""
        try:
            if page is None:
                raise OSError("it shares no memory of a device")
            self._fetching = way.reach(page)
        except OSError as error:
            return f"brought by the host, since they cannot be {way.name}: {error}"
        self._counters[DEVICE] = 1
        return way.name

    def fetch(self, where: bytes, form: Form) -> Payload:
        """Return a payload whose copy has begun; raise OSError if it cannot be copied."""
        if self._fetching is None:
            raise Malformed("malformed message: a payload lies on a device that this worker does not read")
        payload, copied = self._fetching(where, form)
        self.copying.append(copied)
        return payload

    def settle(self, *, wait: bool) -> None:
        """Tell the writer how many of its payloads have been copied; `wait` for the rest."""
        with self._settling:
            while self.copying and (wait or self.copying[0].query()):
                self.copying[0].synchronize()
                self.copying.popleft()
                self._counters[COPIED] += 1

    def release(self) -> None:
        """Let go of the writer's memory."""
        self.settle(wait=True)
        if self._fetching is not None:
            self._fetching.release()
