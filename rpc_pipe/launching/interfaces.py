"""By which of a host's network interfaces others reach it."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

from ..dependency import ConfigError

LOOPBACK = "lo"


def interface_towards(host: str) -> str:
    """Return the name of the interface whose address packets to `host` leave from.

    TensorPipe would take what the host's own name resolves to, which Debian and Ubuntu answer with
    127.0.1.1 (pytorch#42879).

    Raises:
        ConfigError: the host is unknown, or no interface leads there.
    """
    try:
        info = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])  # a datagram socket: nothing is sent
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR {host}: {error}") from error
    if own.startswith("127.") or own == "::1":
        return LOOPBACK
    for name, address in _interface_addresses():
        if address == own:
            return name
    raise ConfigError(f"MASTER_ADDR {host}: no interface has the address {own} that leads there")


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface.

    Raises:
        ConfigError: there is no such interface, or it has none.
    """
    found = _interface_addresses()
    for name, address in found:
        if name == interface:
            return address
    known = ", ".join(sorted({name for name, _ in found}))
    raise ConfigError(f"RPC_PIPE_INTERFACE {interface}: has no address; those that have are {known}")


def _interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address), aliases included (SIOCGIFCONF, netdevice(7))."""
    size = 40  # of struct ifreq on 64-bit Linux
    buffer = array.array("B", bytes(size * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(probe.fileno(), 0x8912, request))[0]
    data = buffer.tobytes()
    return [
        (data[i : i + 16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(data[i + 20 : i + 24]))
        for i in range(0, used, size)
    ]
