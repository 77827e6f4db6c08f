"""Both ends of payloads that travel from a device of the writer to one of the reader."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...dependency import Malformed
from .form import Form
from .outbox import Key
from .payload import Laid, Payload, Staying
from .peer_memory import COPIED, DEVICE, HANDLES, ON_HOST

if TYPE_CHECKING:
    from .device_way import BlockFetching, BlockLending, DeviceWay

logger = logging.getLogger(__name__)


class ToDevice:
    """Writes places of payloads of this worker's device for one reader. Thread-safe.

    Args:
        way: this worker's end; None: it has no device.
        counters: the reader's: the kind of memory that it reads, and the number of payloads that it has copied.
        record: writes to the reader the key of a payload, its form and where it lies; returns whether there is room.
    """

    def __init__(
        self, way: DeviceWay | None, counters: memoryview, record: Callable[[Key, bytes, bytes], bool]
    ) -> None:
        self._way, self._counters, self._record = way, counters, record
        self._lock = threading.Lock()
        self._lending: BlockLending | None = None

    @property
    def takes(self) -> bool:
        """Whether the reader takes payloads of this worker's device, in memory that works."""
        return self._way is not None and bool(self._counters[DEVICE])

    def write(self, key: Key, payload: Payload) -> tuple[int, int, list[Tensor]] | None:
        """Write where a payload lies; None: it lies nowhere yet, or there is no room. Returns as `_Writer.write`."""
        with self._lock:  # a block, and its number, are in the order of records
            laid = payload if isinstance(payload, Laid) else self._laid(key, payload, HANDLES)
            if laid is None or self._lending is None:
                return None
            if not self._record(key, laid.form, laid.block.shared):
                self._lending.untold(laid.block)
                return None
            return COPIED, self._lending.told(laid.block), laid.tensors

    def lay_on_host(self, key: Key, payload: Staying) -> Laid | None:
        """Have a payload copied to memory of the host that the reader's device reaches; None: it reaches none."""
        with self._lock:
            return self._laid(key, payload, ON_HOST)

    def _laid(self, key: Key, payload: Any, kind: int) -> Laid | None:
        if self._way is None or self._counters[DEVICE] != kind:
            return None
        try:
            self._lending = self._lending or self._way.lending(kind)
            return self._lending.lay(key[1], payload, self._counters[COPIED])
        except (OSError, RuntimeError) as error:
            logger.info("payloads leave the device by the host: %s", str(error).partition("\n")[0])
            self._way = None
            return None


class FromDevice:
    """Brings payloads from a device of another process.

    Args:
        counters: the reader's; they show the writer which payloads have been copied.
    """

    def __init__(self, counters: memoryview) -> None:
        self._counters = counters
        self._fetching: BlockFetching | None = None
        #: the events of copies that the counter does not show yet
        self.copying: deque[Any] = deque()
        self._settling = threading.Lock()

    def choose(self, way: DeviceWay, page: Any) -> str:
        """Have payloads taken from the writer's device, if that works. Return how they travel."""
        try:
            if page is None:
                raise OSError(f"{way.name}: it has none")
            self._fetching = way.reach(page)
        except OSError as error:
            return f"brought by the host, since they cannot be {error}"
        self._counters[DEVICE] = self._fetching.kind
        return self._fetching.how

    def fetch(self, where: bytes, form: Form) -> Payload:
        """Return a payload that is being copied; raise OSError if it cannot be copied."""
        if self._fetching is None:
            raise Malformed("malformed message: a payload lies on a device that this worker does not read")
        payload, copied = self._fetching(where, form)
        self.copying.append(copied)
        return payload

    def settle(self, *, wait: bool) -> None:
        """Show the writer how many of its payloads have been copied; `wait` for the rest."""
        with self._settling:
            while self.copying and (wait or self.copying[0].query()):
                self.copying[0].synchronize()
                self.copying.popleft()
                self._counters[COPIED] += 1

    def release(self) -> None:
        """Release the writer's memory."""
        self.settle(wait=True)
        if self._fetching is not None:
            self._fetching.release()
