"""Which congestion control the connections of a listener have: one that does not pace bursts.

Under BBR, the default of many servers, a message that is alone on its way takes twice as long as under reno. Cubic
leaves slow start too early where a burst looks like a queue: 256 KiB every 30 ms over 20 ms took 22 to 44 ms one way
under reno, 25 to 60 under BBR, 25 to 400 under cubic. Where packets are lost BBR is the faster one by far: who has
such a line asks for it.
"""

from __future__ import annotations

import socket
from contextlib import suppress

#: those that are tried for a listener, in order; others are taken only if one asks for them
CONGESTION = "reno,cubic"
_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)


def choose(listener: socket.socket, names: str) -> None:
    """Choose the first of `names` that the system allows, which accepted connections inherit; none: its own stays."""
    for name in filter(None, names.split(",")):
        with suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, name.encode())
            return
