"""Ways for large payloads: the producer says where its tensors lie, and the consumer fetches what is in them.

Nobody sends: a payload stays where it was made until its consumer has taken it, into memory of its own. When two
workers meet, the producer tells a page of each way that it has, by name; the consumer tries those that it has too, in
order, and takes the first that works. Which one that is changes no bit and no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from ...dependency import ConfigError
from .form import Look
from .peer_memory import PeerMemory

#: returns the tensors of a payload one after the other, each of which looks so; raises OSError if it cannot
Fetch = Callable[[Look], Tensor]


class Way(Protocol):
    """One end of a way, which every worker makes for itself: OSError says that its system does not have it."""

    #: how payloads come by it, in a sentence about them
    name: str

    def page(self) -> Any:
        """Return what a consumer needs to try this, a plain value."""

    def lay(self, tensors: Sequence[Tensor]) -> bytes:
        """Return where these lie, which stay as they are until they have been taken."""

    def reach(self, page: Any) -> Callable[[bytes], Fetch]:
        """Return what fetches from the producer of this page, by where its tensors lie.

        Raises:
            OSError: this way does not work, and why.
        """


#: by the names that users type
WAYS: dict[str, Callable[[], Way]] = {"memory": PeerMemory}


def ways_here(wanted: Iterable[str]) -> dict[str, Way]:
    """Return those of the `wanted` ways that this system has, the best first.

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
