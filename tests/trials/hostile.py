"""What strangers can do to a job over ZeroMQ: connections of all kinds to every port that its workers open.

    python tests/trials/hostile.py [--connections 1000] [--steps 60] [--transport zmq]

The job is trained once in peace and once under attack; the losses must have the same bits. With --transport rpc it is
shown what TensorPipe does: it aborts.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import zmq

_ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import time
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

layers = [partial(nn.Linear, 64, 64), nn.Tanh, partial(nn.Linear, 64, 64), nn.Tanh, partial(nn.Linear, 64, 4)]
sgd = partial(torch.optim.SGD, lr=0.1)
pipe = Pipeline(layers, nn.functional.cross_entropy, num_microbatches=8, training=Training(sgd))
draw = torch.Generator().manual_seed(0)
for step in range(int(sys.argv[1])):
    loss = pipe.step((torch.randn(32, 64, generator=draw), torch.randint(4, (32,), generator=draw)))
    time.sleep(float(sys.argv[2]))
    if step == 0 and pipe.worker == 0:
        print("training", flush=True)
if pipe.worker == 0:
    print("loss", loss.hex(), flush=True)
"""
#: of a packet: length of the header of Ethernet, and what any protocol is called
_ETHERNET, _ALL_PROTOCOLS = 14, 3
#: so much of what a worker said is said again
_MOST_REPLAYED = 2**16
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"


def _http(draw: random.Random) -> bytes:
    return b"GET / HTTP/1.0\r\nHost: x\r\n\r\n"


def _garbage(draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(1, 20_000))


def _length(draw: random.Random) -> bytes:
    return (
        _GREETING + b"CURVE" + bytes(47) + b"\x02" + struct.pack(">Q", draw.choice([2**30, 2**40, 2**63])) + b"x" * 64
    )


def _truncated(draw: random.Random) -> bytes:
    whole = _GREETING + b"CURVE" + bytes(47) + b"\x04\xc8\x05HELLO" + bytes(194)
    return whole[: draw.randrange(len(whole))]


def _handshake(draw: random.Random) -> bytes:
    return _GREETING + b"CURVE" + bytes(47) + b"\x04\xc8\x05HELLO\x01\x00" + draw.randbytes(192)


def _no_security(draw: random.Random) -> bytes:
    return (
        _GREETING + b"NULL" + bytes(48) + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + draw.randbytes(99)
    )


def _slow(draw: random.Random) -> bytes:
    return b""


_KINDS: list[Callable[[random.Random], bytes]] = [
    _http, _garbage, _length, _truncated, _handshake, _no_security, _slow
]  # fmt: skip


class Sniffer(threading.Thread):
    """Notes what workers say to each other first, where this process may look at the loopback interface."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        #: by (port it comes from, port it goes to)
        self.said: dict[tuple[int, int], bytearray] = {}
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        self._socket.bind(("lo", 0))
        self._over = False

    def run(self) -> None:
        while not self._over:
            packet, (_, _, kind, *_) = self._socket.recvfrom(2**16)
            ip = packet[_ETHERNET:]
            if kind != socket.PACKET_OUTGOING or len(ip) < 40 or ip[0] >> 4 != 4 or ip[9] != socket.IPPROTO_TCP:
                continue  # on this interface each packet is seen twice
            tcp = ip[4 * (ip[0] & 15) :]
            payload = tcp[4 * (tcp[12] >> 4) :]
            said = self.said.setdefault(struct.unpack_from(">HH", tcp), bytearray())
            if len(said) < _MOST_REPLAYED:
                said += payload

    def to(self, port: int) -> list[bytes]:
        """Return what was said to a port by those who spoke ZeroMQ."""
        self._over = True
        told = [bytes(said) for (_, at), said in list(self.said.items()) if at == port]
        return [said for said in told if said.startswith(_GREETING[:1])]


class Attack(threading.Thread):
    """Connections to a port, one after the other; slow ones stay.

    Args:
        replayed: what workers have said to the port.
    """

    def __init__(self, port: int, connections: int, replayed: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._replayed = replayed
        self.port, self._connections = port, connections
        self.done: Counter[str] = Counter()
        self._open: list[socket.socket] = []

    def run(self) -> None:
        draw = random.Random(self.port)
        for number in range(self._connections):
            kind = _KINDS[number % len(_KINDS)]
            name, data = kind.__name__[1:].replace("_", " "), kind(draw)
            if self._replayed and kind is _handshake and number % 2:
                name, data = "replayed", draw.choice(self._replayed)
            with suppress(OSError):
                self._connect(name, data)
        self._forge()

    def _connect(self, name: str, data: bytes) -> None:
        stranger = socket.create_connection(("127.0.0.1", self.port), timeout=2)
        self.done[name] += 1
        if not data:
            self._open.append(stranger)
            return
        with stranger, suppress(OSError):
            stranger.sendall(data)
            stranger.settimeout(0.02)
            stranger.recv(100)

    def _forge(self) -> None:
        """Speak ZeroMQ properly, with a key of one's own."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger, stranger.routing_id = 0, b"1"
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = zmq.curve_keypair()[0]
            stranger.connect(f"tcp://127.0.0.1:{self.port}")
            self.done["forged key"] += 1
            if stranger.poll(500):
                raise SystemExit(f"port {self.port} answered a stranger: {stranger.recv_multipart()!r}")


def train(transport: str, steps: int, connections: int) -> tuple[str, list[str]]:
    """Train, under attack if there are `connections`; return the loss, and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        port = _free_port()
        command = [sys.executable, "-m", "rpc_pipe", "run", str(script), "--workers", "3", "--transport", transport]
        command += ["--port", str(port), "--", str(steps), "0"]
        sniffer = _sniffer() if connections else None
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        attack = (lambda launcher: _attack(launcher, connections, sniffer)) if connections else None
        return loss_of(command, environment, attack)


def loss_of(
    command: list[str], environment: dict[str, str], attack: Callable[[int], None] | None
) -> tuple[str, list[str]]:
    """Run a job that trains; return the loss, and what was said.

    Args:
        attack: called with the launcher's process when the job says that it trains.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as launcher:
        assert launcher.stdout is not None
        lines = []
        for line in launcher.stdout:
            lines.append(line.rstrip())
            if "training" in line and attack is not None:
                attack(launcher.pid)
        code = launcher.wait()
    losses = re.findall(r"loss (0x\S+|-0x\S+)", "\n".join(lines))
    return losses[0] if losses and code == 0 else f"none: the job ended with {code}", lines


def _sniffer() -> Sniffer | None:
    try:
        sniffer = Sniffer()
    except OSError as error:
        print(f"nothing is replayed: what workers say cannot be seen here: {error.strerror}")
        return None
    sniffer.start()
    return sniffer


def _attack(launcher: int, connections: int, sniffer: Sniffer | None) -> None:
    ports = sorted({
        connection.laddr.port
        for process in psutil.Process(launcher).children(recursive=True)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    })  # fmt: skip
    attacks = [Attack(port, connections, [] if sniffer is None else sniffer.to(port)) for port in ports]
    begin = time.perf_counter()
    for attack in attacks:
        attack.start()
    for attack in attacks:
        attack.join(100)
    print(f"{sum(sum(a.done.values()) for a in attacks)} connections to {len(ports)} ports "
          f"in {time.perf_counter() - begin:.1f} s: {dict(sum((a.done for a in attacks), Counter()))}")  # fmt: skip


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description="hostile connections to every open port of a job")
    parser.add_argument("--connections", type=int, default=1000, help="to each port (1000)")
    parser.add_argument("--steps", type=int, default=300, help="(300)")
    parser.add_argument("--transport", choices=("zmq", "rpc"), default="zmq")
    options = parser.parse_args()
    in_peace, _ = train(options.transport, options.steps, 0)
    attacked, lines = train(options.transport, options.steps, options.connections)
    for line in lines:
        if "refused" in line or "──" in line or "signal" in line:
            print(line)
    print(f"loss in peace {in_peace}, under attack {attacked}: {'the same' if in_peace == attacked else 'DIFFERENT'}")
    sys.exit(in_peace != attacked)


if __name__ == "__main__":
    main()
