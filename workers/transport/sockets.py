"""The ZeroMQ sockets of a worker: one sends all its messages, one receives from all peers.

Each worker binds its sending socket (ROUTER), and receiving peers connect (DEALER): so bulk data leaves from accepted
connections, which have the congestion control of the listening socket: see `CONGESTION`.

Inside a host they are unix sockets in a folder that its owner alone may enter, without port or key; between hosts TCP
with CURVE. See `keys.py` for the authentication.
"""

from __future__ import annotations

import os
import re
import socket as sockets
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from ...dependency import ConfigError, Malformed
from .form import Look, copy_memory
from .keys import HANDSHAKE_MS, Keys

#: congestion controls that are tried for a listener, in order: ones that do not pace bursts. Under BBR, the default of
#: many servers, a message that is alone on its way takes twice as long as under reno. Cubic leaves slow start too early
#: where a burst looks like a queue: 256 KiB every 30 ms over 20 ms took 22 to 44 ms one way under reno, 25 to 60 under
#: BBR, 25 to 400 under cubic. Where packets are lost BBR is the faster one by far: users of such a line ask for it.
CONGESTION = "reno,cubic"
_TCP_CONGESTION = 13
#: frames of a message are no larger, so heartbeats find a gap between them, and a stranger cannot make us reserve more
PIECE_BYTES = 2**22
#: where frames are encrypted: each as a whole before it travels, so the next one is while it does
SECRET_PIECE_BYTES = 2**17
_MOST_FRAME_BYTES = 2 * PIECE_BYTES
#: unread bytes that a unix socket holds, where the system allows it; TCP adapts by itself
_UNIX_BUFFER_BYTES = 2**22
_RECONNECT_MS, _RECONNECT_MOST_MS = 20, 500
_CONNECT_MS = 5000
#: largest frame at the listening socket, which takes proofs of identity alone: a stranger's frame may be kept
_MOST_PROOF_BYTES = 2**12
_BACKLOG = 1024
_ADDRESS = re.compile(r"tcp://([0-9]{1,3}(?:\.[0-9]{1,3}){3}|\[[0-9a-f:.]{2,45}\]):([0-9]{1,5})")
#: how libzmq spells an address of IPv4 when it reconnects from a socket that may have IPv6
_MAPPED = re.compile(r"\[::ffff:([0-9.]+)\]")
#: events of a monitor about connections that listening sockets accept
_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_CAME = sum((zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, *_FAILED))
#: no enum: its operators are functions in Python
_READABLE = int(zmq.POLLIN)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class Sockets:
    """The sending and the receiving sockets of a worker. All threads may send, one at a time may receive.

    Args:
        keys: of the job; None: every process that can reach the sockets is of this job.
        lost_after_s: seconds that a peer may not answer; None: connections break with the peer alone.
    """

    def __init__(self, context: Context, worker: int, keys: Keys | None, lost_after_s: float | None) -> None:
        self._lock = threading.Lock()
        self._worker, self._keys = worker, keys
        self._piece_bytes = PIECE_BYTES if keys is None else SECRET_PIECE_BYTES
        self._speaks, self._hears = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for socket in (self._speaks, self._hears):
            _set(socket, lost_after_s)
        self._speaks.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._hears.setsockopt(zmq.ROUTING_ID, str(worker).encode())
        self._speaks.maxmsgsize = _MOST_PROOF_BYTES
        if keys is not None:
            keys.listen(self._speaks, worker)
        self.monitors = self._speaks.get_monitor_socket(_CAME), self._hears.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        #: where this worker is reached over a network
        self.bound = ""
        #: where it is reached inside the host; a descriptor of that folder if its path is too long for unix sockets
        self._file: Path | None = None
        self._folder = -1
        self._peers: dict[str, int] = {}
        #: accepted connections, and the authenticated ones among them
        self._came = self._known = 0
        self._closed = False

    def bind_in(self, folder: Path) -> None:
        """Be reached through a unix socket in `folder`.

        Raises:
            ConfigError: other users may enter it.
        """
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(f"{folder}: must be a folder that only you can enter; chmod 700 {folder}")
        self._file = folder / _name(self._worker)
        self._speaks.bind(self._address(folder, self._worker))

    def bind_tcp(self, host: str, port: int, congestion: str) -> str:
        """Be reached over a network; return the address.

        Args:
            host: address of an interface of this host.
            port: 0: any.
            congestion: names of congestion controls; the first is taken that the system allows.

        Raises:
            ConfigError: it cannot be listened there.
        """
        listener = sockets.socket(sockets.AF_INET6 if ":" in host else sockets.AF_INET, sockets.SOCK_STREAM)
        try:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            choose(listener, congestion)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}") from error
        self.bound = f"tcp://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        self._speaks.setsockopt(zmq.USE_FD, listener.detach())
        self._speaks.bind(self.bound)
        return self.bound

    def connect_in(self, folder: Path, peer: int) -> None:
        """Receive from `peer`, a worker of this host."""
        self._connect(peer, self._address(folder, peer))

    def _address(self, folder: Path, worker: int) -> str:
        path = folder / _name(worker)
        if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            if self._folder < 0:
                self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            path = Path(f"/proc/self/fd/{self._folder}") / _name(worker)
        return f"ipc://{path}"

    def connect_tcp(self, address: str, peer: int) -> None:
        """Receive from `peer`, a worker of another host.

        Raises:
            ConfigError: the exchanged text is no address.
        """
        if not _ADDRESS.fullmatch(address):
            raise ConfigError(f"worker {peer} is said to be at {address[:40]!r}, which is no address")
        assert self._keys is not None
        self._keys.prove(self._hears, self._worker, peer)
        self._connect(peer, address)

    def _connect(self, peer: int, address: str) -> None:
        self._peers[address] = peer
        self._hears.connect(address)

    def say(self, peer: int, head: bytes, body: bytes = b"", tensors: Iterable[Tensor] = ()) -> None:
        """Hand a message on to be sent to `peer`, if it is connected."""
        frames = [str(peer).encode(), *frames_of(head, body, tensors, self._piece_bytes)]
        with self._lock:
            if not self._closed:
                self._speaks.send_multipart(frames, zmq.DONTWAIT, copy=False)

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when a message may have come since the last call of `hear` returned None."""
        return int(self._hears.getsockopt(zmq.FD))

    def hear(self) -> Frames | None:
        """Return the next message; None if none has arrived.

        Raises:
            ContextTerminated: the worker leaves.
        """
        if not self._hears.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
            return None
        first = self._hears.recv()
        rest = []
        while self._hears.getsockopt(zmq.RCVMORE):
            rest.append(self._hears.recv(copy=False))
        return Frames(first, rest)

    def broken(self, monitor: Socket) -> Iterator[int]:
        """Yield the peers that were lost since the last call; for the watching thread."""
        while monitor.poll(0):
            event = parse_monitor_message(monitor.recv_multipart())
            kind = event["event"]
            if monitor is self.monitors[0]:
                self._came += kind == zmq.EVENT_ACCEPTED
                self._known += kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            elif (address := _MAPPED.sub(r"\1", event["endpoint"].decode(errors="replace"))) in self._peers:
                yield self._peers[address]

    @property
    def refused(self) -> int:
        """How many connections there have been that did not prove to be a worker of this job."""
        return self._came - self._known

    def fall_silent(self) -> None:
        """Send nothing more, once earlier messages are sent, within a second."""
        with self._lock:
            self._closed = True
            self._speaks.close(1000)

    def close_hearing(self) -> None:
        """Receive nothing more."""
        self._hears.close(0)

    def clear_up(self) -> None:
        """Remove the files on the disk, when the context has ended."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


class Frames:
    """A message as it arrived: its first frame, and further ones that may not be cut at its parts."""

    def __init__(self, first: bytes, rest: list[zmq.Frame]) -> None:
        self.first = first
        self._rest = deque([frame.buffer for frame in rest])
        self._left = sum(map(len, self._rest))

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes behind the first frame."""
        return b"".join(self._take(size))

    def tensor(self, look: Look) -> Tensor:
        """Return the next tensor, which looks so."""
        parts = self._take(look.num_bytes)
        tensor = look.empty()
        to = tensor.data_ptr()
        for part in parts:
            at = numpy.frombuffer(part, numpy.uint8).__array_interface__["data"][0]
            copy_memory(to, at, len(part))
            to += len(part)
        return tensor

    def refuse_rest(self) -> None:
        """Raise Malformed if bytes are left."""
        if self._left:
            raise Malformed(f"malformed message: {self._left} bytes more than it says are beside it")

    def _take(self, size: int) -> list[memoryview]:
        if not 0 <= size <= self._left:
            raise Malformed(f"malformed message: {size} bytes are not beside it")
        self._left -= size
        taken = []
        while size:
            part = self._rest.popleft()
            if len(part) > size:
                self._rest.appendleft(part[size:])
                part = part[:size]
            size -= len(part)
            taken.append(part)
        return taken


def frames_of(head: bytes, body: bytes, tensors: Iterable[Tensor], most_bytes: int) -> list[Any]:
    """Return a message as frames of `most_bytes` at most, behind its head. The tensors, all dense, are not copied."""
    frames: list[Any] = [body[at : at + most_bytes] for at in range(0, max(1, len(body)), most_bytes)]
    frames[0] = head + frames[0]
    for tensor in tensors:
        memory = memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())  # type: ignore[arg-type]
        frames += [memory[at : at + most_bytes] for at in range(0, len(memory), most_bytes)]
    return frames


def choose(listener: sockets.socket, names: str) -> None:
    """Choose the first congestion control of `names` that the system allows; none: the default stays."""
    for name in filter(None, names.split(",")):
        with suppress(OSError):
            listener.setsockopt(sockets.IPPROTO_TCP, _TCP_CONGESTION, name.encode())
            return


def _set(socket: Socket, lost_after_s: float | None) -> None:
    socket.sndhwm = socket.rcvhwm = 0  # windows bound the messages under way
    socket.maxmsgsize = _MOST_FRAME_BYTES
    socket.linger = 0
    socket.ipv6 = True  # IPv4 works as before
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if lost_after_s is None:
        socket.setsockopt(zmq.SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * lost_after_s / 8)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * lost_after_s)))


def _name(worker: int) -> str:
    return f"socket-{worker}"
