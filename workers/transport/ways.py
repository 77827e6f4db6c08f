"""The way of payloads between devices of one host: what the transport asks of a device.

A payload stays on its device until the consumer's device has copied it. When two workers meet, the producer sends a
page, and the consumer tries it. The choice changes no bit and no order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .form import Form
from .payload import Laid, Payload, Staying

#: kinds of memory for payloads of a device: the device's, opened by handles; the host's
HANDLES, ON_HOST = 1, 2


class Lending(Protocol):
    """Memory that one consumer's device reads."""

    def lay(self, name: str, payload: Staying, taken: int) -> Laid:
        """Return a payload in a block; raise RuntimeError or OSError if none. Blocks up to number `taken` are free."""

    def told(self, block: Any) -> int:
        """Return the number of the payload in a block that has a record for the consumer."""

    def untold(self, block: Any) -> None:
        """Note that the payload in a block takes another way."""


class Fetching(Protocol):
    """Brings payloads from a producer's device to this worker's."""

    #: of memory
    kind: int
    #: how payloads travel, in a sentence about them
    how: str

    def __call__(self, where: bytes, form: Form) -> tuple[Payload, Any]:
        """Return a payload and the event of its copy; raise OSError if it cannot be copied."""

    def release(self) -> None:
        """Release the producer's memory."""


class DeviceWay(Protocol):
    """One end of the way between devices of one host: no processor copies."""

    name: str
    device: torch.device

    def page(self) -> Any:
        """Return what a consumer needs to try this, a plain value."""

    def lending(self, kind: int) -> Lending:
        """Return memory for one consumer, of the kind that it has chosen."""

    def reach(self, page: Any) -> Fetching:
        """Return the fetching from the producer of this page; raise OSError if this way does not work."""
