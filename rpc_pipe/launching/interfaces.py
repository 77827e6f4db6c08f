"""Needs of workers on several hosts: the interface for connections from other hosts, and the secret of the job."""

import fcntl
import os
import secrets
import socket
import struct
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..system.files import read_file, refused
from . import LOOPBACK

#: the host's IPv6 addresses (proc(5)), and the scope of link-local ones
_IPV6, _LINK_LOCAL = Path("/proc/net/if_inet6"), "20"
#: of a secret
_LEAST_BYTES = 32


def interface_towards(host: str) -> str:
    """Return the name of the interface that routes packets to `host`.

    TensorPipe would take the address of the local host name, which Debian and Ubuntu answer with
    127.0.1.1 (pytorch#42879).

    Raises:
        ConfigError: the host is unknown, or no interface leads there.
    """
    try:
        family, address = resolved(host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR {host}: {error}") from error
    if own.startswith("127.") or own == "::1":
        return LOOPBACK
    for name, address in _interface_addresses():
        if address == own:
            return name
    raise ConfigError(f"MASTER_ADDR {host}: no interface has the address {own} that leads there")


def address_of(interface: str, like: str) -> str:
    """Return the address of an interface, of the IP version of the host `like` if it has one.

    Raises:
        ConfigError: there is no such interface, or it has none.
    """
    found = _interface_addresses()
    own = [address for name, address in found if name == interface]
    if own:
        by_ipv6 = resolved(like)[0] == socket.AF_INET6
        return min(own, key=lambda address: (":" in address) != by_ipv6)
    known = ", ".join(sorted({name for name, _ in found}))
    raise ConfigError(f"RPC_PIPE_INTERFACE {interface}: has no address; those that have are {known}")


def resolved(host: str) -> tuple[int, Any]:
    """Return the address family and the socket address of a host.

    Raises:
        ConfigError: the host is unknown.
    """
    try:
        info = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR {host}: {error}") from error
    return info[0], info[4]


def _interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of all interfaces, IPv4 first (SIOCGIFADDR, netdevice(7))."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                request = fcntl.ioctl(probe, 0x8915, struct.pack("40s", name.encode()))
                found.append((name, socket.inet_ntoa(request[20:24])))
    with suppress(OSError):  # the kernel has no IPv6
        for address, _, _, scope, _, name in map(str.split, _IPV6.read_text().splitlines()):
            if scope != _LINK_LOCAL:
                found.append((name, str(IPv6Address(int(address, 16)))))
    return found


def make_key(path: Path) -> None:
    """Write a new secret to a file that only its owner can read.

    Raises:
        ConfigError: it is there already, or cannot be written.
    """
    with refused(ConfigError, f"{path}: cannot be made"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read_key(path: Path) -> bytes:
    """Return the secret in a file.

    Raises:
        ConfigError: other users can read the file, or it belongs to another user, or it holds no secret.
    """
    secret = read_file(path, f"key file {path}").encode().strip()
    if (found := path.stat()).st_mode & 0o077:
        raise ConfigError(f"key file {path}: others can read it; chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid()):  # root reads every file, and the file's owner knows the key
        raise ConfigError(f"key file {path}: belongs to user {found.st_uid}, who can read it; chown it")
    if len(secret) < _LEAST_BYTES:
        rule = f"must be at least {_LEAST_BYTES}; `rpc-pipe key FILE` makes one"
        raise ConfigError(f"key file {path}: holds {len(secret)} bytes; {rule}")
    return secret
