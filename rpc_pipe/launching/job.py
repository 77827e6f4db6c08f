"""Who this process is: one worker of a job that a launcher or torchrun started, or all workers at once.

The launcher sets the same variables as torchrun (RANK, WORLD_SIZE) and its own (RPC_PIPE_*); under torchrun
the workers meet at its store.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ..dependency import ConfigError
from . import launcher_link as link

if TYPE_CHECKING:
    from ..workers.transport.carrier import Carrier

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: set by our launcher: where local workers meet
INIT = "RPC_PIPE_INIT"


@dataclass(frozen=True)
class Job:
    """One worker process among several."""

    worker: int
    num_workers: int
    #: where the workers meet, as `init_rpc` takes it
    init_method: str
    #: the network interface that the others reach this worker by
    interface: str
    #: how long to wait for the other workers at the start
    join_timeout_s: float = 120.0
    #: whether workers of one host use shared memory between them
    shared_memory: bool = True


def current_job(environ: Mapping[str, str] | None = None) -> Job | None:
    """Return the job that this process was started for, None if it is on its own.

    Raises:
        ConfigError: variables of torchrun or of ours are only partly set, or make no sense.
    """
    environ = os.environ if environ is None else environ
    shared_memory = _on(environ, "RPC_PIPE_SHARED_MEMORY")
    timeout = _seconds(environ, "RPC_PIPE_JOIN_TIMEOUT", 120.0)
    local = environ.get(INIT)
    wanted = ("RANK", "WORLD_SIZE") if local else _TORCHRUN
    present = [name for name in wanted if name in environ]
    if not present:
        return None
    missing = [name for name in wanted if name not in environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not set, but {', '.join(present)} is; torchrun sets all of "
            f"{', '.join(wanted)}. Unset {', '.join(present)} to start local workers instead"
        )
    worker, num_workers = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= worker < num_workers:
        raise ConfigError(f"RANK {worker}: must be 0 to WORLD_SIZE - 1 = {num_workers - 1}")
    if local:
        interface = environ.get("RPC_PIPE_INTERFACE", "lo")
        return Job(worker, num_workers, local, interface, timeout, shared_memory)
    address = environ["MASTER_ADDR"]
    _number(environ, "MASTER_PORT")
    return Job(worker, num_workers, "env://", interface_towards(address), timeout, shared_memory)


def _on(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"{name} {value!r}: must be on or off")
    return value == "on"


def _seconds(environ: Mapping[str, str], name: str, usual: float) -> float:
    try:
        found = float(environ.get(name, usual))
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"{name} {environ[name]!r}: must be a number of seconds above 0")
    return found


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        found = int(environ[name])
    except ValueError:
        found = -1
    if found < 0:
        raise ConfigError(f"{name} {environ[name]!r}: must be a whole number")
    return found


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
        return "lo"
    for name, address in _interface_addresses():
        if address == own:
            return name
    raise ConfigError(f"MASTER_ADDR {host}: no interface has the address {own} that leads there")


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


@cache
def join(job: Job) -> Carrier:
    """Meet the other workers; once in the life of a process (pytorch#46491).

    Raises:
        ConfigError: they did not come.
    """
    # Both, because init_rpc builds a gloo group besides TensorPipe's own connections (pytorch#42879).
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = job.interface
    from ..workers.transport.rpc import RpcCarrier  # here, so that planning loads without torch

    where = job.init_method, job.join_timeout_s
    link.tell(kind="joining")
    carrier = RpcCarrier(job.worker, job.num_workers, *where, shared_memory=job.shared_memory)
    link.tell(kind="joined")
    atexit.register(carrier.close)
    return carrier
