"""Ways for large payloads: the producer sends the place of its tensors, and the consumer fetches their contents.

A payload stays where it was made until its consumer has copied it. When two workers meet, the producer sends a page for
each of its ways, by name. The consumer tries the ways that both have, in order, and takes the first that works. The
choice changes no bit and no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from ...dependency import ConfigError
from .form import Form
from .payload import Laid, Payload, Staying
from .peer_memory import Fetch, PeerMemory

#: kinds of memory for payloads of a device: the device's, opened by handles; the host's
HANDLES, ON_HOST = 1, 2


class Way(Protocol):
    """One end of a way, which every worker makes for itself; raises OSError if its system does not have it."""

    #: how payloads travel by it, in a sentence about them
    name: str

    def page(self) -> Any:
        """Return what a consumer needs to try this, a plain value."""

    def lay(self, tensors: Sequence[Tensor]) -> bytes:
        """Return where these lie, which stay as they are until they have been taken."""

    def reach(self, page: Any) -> Fetch:
        """Return a function that fetches tensors of the producer of this page, by their place.

        Raises:
            OSError: this way does not work, and why.
        """


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


#: by the names that users type
WAYS: dict[str, Callable[[], Way]] = {"memory": PeerMemory}


def ways_here(wanted: Iterable[str]) -> dict[str, Way]:
    """Return the `wanted` ways that this system has, the best first.

    Raises:
        ConfigError: there is none of that name.
    """
    found: dict[str, Way] = {}
    for name in wanted:
        if name not in WAYS:
            raise ConfigError(f"RPC_PIPE_WAYS {name!r}: must be {' or '.join(WAYS)}; several with commas between")
        with suppress(OSError):
            found[name] = WAYS[name]()
    return found
