"""Hosts on one machine, for tests: network namespaces, joined by packets that a thread of the test carries.

Each host has its own name, which resolves to 127.0.1.1 as on Debian, its own boot ID, and as many interfaces as wanted:
host 1 is 10.88.0.2 in the first network, 10.88.1.2 in the second, or fd88:0::2 and fd88:1::2.
Needs root, TUN devices, iproute2 and util-linux.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import tempfile
import threading
import time
import uuid
from pathlib import Path

from fork_server import Started
from processes import start

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_SETUP = "hostname h{host} && mount --bind {names} /etc/hosts && mount --bind {boot} {boot_id} && echo ready && cat"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: a script in the namespaces of a process
_ENTER = """
import ctypes, os, runpy, sys
libc, (_, host, *sys.argv) = ctypes.CDLL(None, use_errno=True), sys.argv
for kind in ("net", "uts", "mnt"):
    if libc.setns(os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), f"setns {kind}")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def why_not() -> str:
    """Return why there can be no hosts here, nothing if there can be."""
    if os.geteuid() != 0:
        return "hosts need root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"hosts need {', '.join(missing)}"
    if not os.path.exists("/dev/net/tun"):
        return "hosts need /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "hosts need the right to make namespaces"


class Hosts:
    """As many hosts as are wanted, until the end of a `with` block.

    Args:
        delay_s: one way.
        loss: share of packets that are lost.
        networks: interfaces of each host.
        ipv6: whether these have addresses of IPv6, and none of IPv4.
    """

    def __init__(
        self, count: int = 2, *, delay_s: float = 0.0, loss: float = 0.0, networks: int = 1, ipv6: bool = False
    ) -> None:
        self._count, self._networks, self._ipv6 = count, networks, ipv6
        self.delay_s, self.loss = delay_s, loss
        #: hosts whose cables are pulled
        self.cut: set[int] = set()
        self._draw = random.Random(0)
        self._folder = tempfile.TemporaryDirectory()
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._started: list[Started | subprocess.Popen[str]] = []
        #: (network, host) -> device
        self._devices: dict[tuple[int, int], int] = {}
        self._over = threading.Event()
        self._carrier = threading.Thread(target=self._carry, daemon=True)

    def address(self, host: int, network: int = 0) -> str:
        """Return the address of a host."""
        return f"fd88:{network}::{host + 1}" if self._ipv6 else f"10.88.{network}.{host + 1}"

    def start(
        self, host: int, script: Path, *arguments: str, anew: bool = False, **environment: str
    ) -> Started | subprocess.Popen[str]:
        """Start a Python script in a host, with `environment` besides this process's; its output is one stream."""
        inside = ["-c", _ENTER, self._hosts[host].pid, script, *arguments]
        self._started.append(start(*inside, merged=True, anew=anew, **environment))
        return self._started[-1]

    def __enter__(self) -> Hosts:
        try:
            for host in range(self._count):
                self._make(host)
        except BaseException:
            self.__exit__()
            raise
        self._carrier.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for process in self._started:
            process.kill()
            process.communicate()
        if self._carrier.ident is not None:
            self._carrier.join()
        for host in self._hosts:
            host.kill()
            host.communicate()
        for device in self._devices.values():
            os.close(device)
        self._folder.cleanup()

    def _make(self, host: int) -> None:
        names, boot = Path(self._folder.name, f"names-{host}"), Path(self._folder.name, f"boot-{host}")
        others = "".join(f"{self.address(other)} h{other}\n" for other in range(self._count) if other != host)
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 h{host}\n{others}")
        boot.write_text(f"{uuid.uuid4()}\n")
        setup = _SETUP.format(host=host, names=names, boot=boot, boot_id=_BOOT_ID)
        command = ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c", setup]
        made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._hosts.append(made)
        assert made.stdout is not None and made.stdout.readline() == b"ready\n"
        inside = ["nsenter", "--target", str(made.pid), "--net", "ip"]
        subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        for network in range(self._networks):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            name = f"rp{os.getpid() % 10**6}n{network}h{host}"[:15]
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
            self._devices[network, host] = device
            subprocess.run(["ip", "link", "set", name, "netns", str(made.pid)], check=True)
            address = f"{self.address(host, network)}/{64 if self._ipv6 else 24}"
            subprocess.run([*inside, "address", "add", address, "dev", name, *["nodad"] * self._ipv6], check=True)
            subprocess.run([*inside, "link", "set", name, "up", "txqueuelen", "10000"], check=True)

    def _carry(self) -> None:
        """Take packets from one device to another, each after its delay."""
        waiting: list[tuple[float, int, int, bytes]] = []
        hosts = {device: host for (_, host), device in self._devices.items()}
        number = 0
        readable = select.poll()
        for device in hosts:
            readable.register(device, select.POLLIN)
        while not self._over.is_set():
            timeout = min(0.05, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.05
            for device in [device for device, _ in readable.poll(1000 * timeout)]:
                try:
                    packet = os.read(device, 65536)
                except OSError:  # it was told to be ready too early, or its host has gone
                    continue
                if packet[0] >> 4 != (6 if self._ipv6 else 4):
                    continue
                to = (packet[27], packet[39] - 1) if self._ipv6 else (packet[18], packet[19] - 1)  # network and host
                if to in self._devices and not {hosts[device], to[1]} & self.cut:
                    if self._draw.random() >= self.loss:
                        number += 1
                        due = time.monotonic() + self.delay_s
                        heapq.heappush(waiting, (due, number, self._devices[to], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                *_, device, packet = heapq.heappop(waiting)
                try:
                    os.write(device, packet)
                except OSError:  # its queue is full, as a switch's may be
                    continue
