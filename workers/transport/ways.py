"""Ways for large payloads: the producer says where its tensors lie, and the consumer fetches what is in them.

Nobody sends: a payload stays where it was made until its consumer has taken it, into memory of its own. When two
workers meet, the producer tells a page of each way that it has, by name; the consumer tries those that it has too, in
order, and takes the first that works. Which one that is changes no bit and no order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from .form import Dense
from .peer_memory import PeerMemory

#: returns the tensors of a payload one after the other, each of which looks so; raises OSError if it cannot
Fetch = Callable[[Dense], Tensor]


class Way(Protocol):
    """One end of a way, which every worker makes for itself: OSError says that its system does not have it."""

    #: how payloads come by it, in a sentence about them; a consumer tries what a producer has under the same name
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


#: the best first
WAYS: tuple[Callable[[], Way], ...] = (PeerMemory,)


def ways_here() -> dict[str, Way]:
    """Return what there is of `WAYS` on this system, by name."""
    found: dict[str, Way] = {}
    for make in WAYS:
        with suppress(OSError):
            way = make()
            found[way.name] = way
    return found
