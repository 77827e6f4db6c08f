"""What a bare socket needs for payloads that come one by one, between hosts: no carrier can be faster.

    python HOSTS.py --delay 20ms -- python bench/bursts.py [--bytes 262144] [--every-ms 50] [--congestion reno,bbr]

HOSTS.py is what emulates hosts, as for `bench/vs_pippy.py`: the same command runs on both, and HOST_INDEX tells which
one it is. The first accepts and sends, as the side does that answers a pull. Times are one way, by the clock that both
share.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import sys
import time
from pathlib import Path

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from rpc_pipe.workers.transport.sockets import choose

_PORT, _WARM_UP, _WAIT_S = 7000, 5, 20.0
_HEAD = struct.Struct("<d")


def send(address: str, port: int, congestion: str, size: int, count: int, every_s: float) -> None:
    """Send `count` payloads to whoever connects."""
    with socket.create_server((address, port)) as listener:
        choose(listener, congestion)
        listener.settimeout(_WAIT_S)
        taker, _ = listener.accept()
    with taker:
        taker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            time.sleep(every_s)
            taker.sendall(_HEAD.pack(time.time()) + bytes(size))
        taker.recv(1)  # until all has come


def take(address: str, port: int, size: int, count: int) -> list[float]:
    """Return how long each payload was under way, ms."""
    found = []
    with _connected(address, port) as giver:
        for _ in range(count):
            data = bytearray()
            while len(data) < _HEAD.size + size:
                data += giver.recv(_HEAD.size + size - len(data))
            found.append(1e3 * (time.time() - _HEAD.unpack_from(data)[0]))
    return found


def _connected(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=_WAIT_S)
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description="payloads one by one over a bare socket between two hosts")
    parser.add_argument("--bytes", type=int, default=2**18, help="of a payload (262144)")
    parser.add_argument("--every-ms", type=float, default=50, help="(50)")
    parser.add_argument("--count", type=int, default=100, help="(100)")
    parser.add_argument("--congestion", default="reno,bbr", help="one after the other (reno,bbr)")
    options = parser.parse_args()
    address = os.environ["HOST_ADDR_0"]
    for number, name in enumerate(options.congestion.split(",")):
        port = _PORT + number
        if os.environ["HOST_INDEX"] == "0":
            send(address, port, name, options.bytes, options.count, options.every_ms / 1e3)
        elif os.environ["HOST_INDEX"] == "1":
            found = take(address, port, options.bytes, options.count)
            late = sorted(found[_WARM_UP:])
            first = ", ".join(f"{ms:.0f}" for ms in found[:_WARM_UP])
            print(f"{name}: {statistics.median(late):.1f} ms in the median, {statistics.mean(late):.1f} on average, "
                  f"{late[len(late) * 9 // 10]:.1f} at 90 %; the first {first}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
