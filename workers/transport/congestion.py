"""Which congestion control a connection has: one that does not pace bursts, or one that bears losses.

Under BBR, the default of many servers, a message that is alone on its way takes twice as long as under reno. Cubic
leaves slow start too early where a burst looks like a queue: 256 KiB every 30 ms over 20 ms took 22 to 44 ms one way
under reno, 25 to 60 under BBR, 25 to 400 under cubic. Where packets are lost BBR is the faster one by far.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

#: those that are tried for a listener, in order; others are taken only if one asks for them
CONGESTION = "reno,cubic"
_LOSSY = b"bbr"
#: a line is lossy if so many packets, and one in so many, were sent again
_LEAST_LOST, _LOST_IN = 20, 300
_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
#: of struct tcp_info: its size, and where the counts of packets are that were sent again, and of all
_INFO_BYTES, _AGAIN_AT, _ALL_AT = 232, 100, 136


def choose(listener: socket.socket, names: str) -> None:
    """Choose the first of `names` that the system allows, which accepted connections inherit; none: its own stays."""
    for name in filter(None, names.split(",")):
        with suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, name.encode())
            return


class Accepted:
    """Connections that a listener has accepted, by descriptors that somebody else closes.

    Args:
        names: those of congestion controls that were asked for; if they are not the usual ones, they stay.
    """

    def __init__(self, names: str) -> None:
        self._stays = names != CONGESTION
        self._descriptors: set[int] = set()

    def add(self, descriptor: int) -> None:
        """There is another connection."""
        if not self._stays:
            self._descriptors.add(descriptor)

    def mind_losses(self, port: int) -> None:
        """Give those of the listener at `port` whose packets get lost to BBR, where the system has it."""
        for descriptor in list(self._descriptors):
            try:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    lossy = connection.getsockname()[1:2] == (port,) and _is_lossy(connection)
                    if not lossy:
                        continue
                    with suppress(OSError):
                        connection.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, _LOSSY)
            except OSError:  # it is closed
                pass
            self._descriptors.discard(descriptor)


def _is_lossy(connection: socket.socket) -> bool:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _ALL_AT + 4:  # an old kernel does not count
        return False
    (again,), (sent,) = struct.unpack_from("I", info, _AGAIN_AT), struct.unpack_from("I", info, _ALL_AT)
    return bool(again >= _LEAST_LOST and again * _LOST_IN > sent)
