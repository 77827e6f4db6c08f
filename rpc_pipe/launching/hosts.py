"""Several hosts of an elastic job: the first host's launcher decides, launchers of other hosts follow. Without torch.

first host's launcher ──begin, worker, order, kill, journal, end──> launcher of another host ──> its workers
first host's launcher <──hello, event, journal── launcher of another host

All messages reach the first host's launcher one after the other, and it alone begins epochs. So no two epochs have
the same number. A step needs all workers of its epoch: on the side of a cut network without that launcher none trains.

A connection proves the key of the job, and is never made again: it breaks when a launcher ends, or is silent for
RPC_PIPE_LOST_AFTER. A host without a connection counts as dead, and ends its workers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..dependency import ConfigError, PipeError

try:
    import zmq
except ImportError as error:
    raise ConfigError("--hosts: needs zmq; pip install '.[zmq]'") from error

from ..workers.transport.keys import HANDSHAKE_MS, Keys, KeyServer
from .interfaces import interface_towards, read_key, resolved
from .job import HOSTS, KEY, Job, seconds
from .worker_process import WorkerEvent

#: a stranger may send one frame before it has proved the key, so frames are small; encryption adds less than that
_FRAME_BYTES = 2**14
MOST_FRAME_BYTES = 2 * _FRAME_BYTES
#: actions of a worker's process, and the words of its launcher
_DETAILS = {"printed": str, "ended": int, "told": dict}
#: errors of reading that a message of other types causes
_UNREADABLE = LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, StopIteration


class _Told(msgspec.Struct):
    """A message of a worker to the launcher: each kind has some of these fields."""

    kind: str
    text: str = ""
    error: str = ""
    goes: str = ""
    name: str = ""
    word: str = ""
    step: int = 0
    live: int = 0
    placed: int = 0
    peer: int = 0
    exit_code: int = 0
    stages: list[int] = []
    places: list[int] = []
    json: dict[str, Any] = {}


def frames_of(message: Sequence[Any]) -> list[bytes]:
    """Return a message as it travels."""
    text = json.dumps(message).encode()
    return [text[at : at + _FRAME_BYTES] for at in range(0, len(text), _FRAME_BYTES)]


@contextmanager
def understood(who: str) -> Iterator[None]:
    """Return a context to read, or follow, a message of the launcher with the name `who`.

    Raises:
        ConfigError: it is none that a launcher of this version sends.
    """
    try:
        yield
    except PipeError:
        raise
    except _UNREADABLE as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"--meet: {who} sends what no launcher of this version does ({why})") from error


def read(frames: Sequence[bytes], who: str) -> list[Any]:
    """Return a message of the launcher with this name.

    Raises:
        ConfigError: it is none.
    """
    with understood(who):
        return msgspec.convert(json.loads(b"".join(frames)), list[Any])


def event_of(rank: int, what: str, detail: Any) -> WorkerEvent:
    """Return an event of a worker of another host.

    Raises:
        ValueError, TypeError, LookupError: it is none.
    """
    msgspec.convert(detail, _DETAILS[what])
    if what == "told":
        msgspec.convert(detail, _Told)
    return WorkerEvent(what, rank, detail)


def write_journal(journal: int, at: int, data: str) -> int:
    """Write a part of a journal that a launcher has sent; return where it ends.

    Raises:
        ValueError, TypeError: it does not follow the present end.
    """
    if journal < 0 or not 0 <= at <= os.fstat(journal).st_size:
        raise ValueError(f"a journal that begins at {at}")
    return at + os.pwrite(journal, bytes.fromhex(data), at)


LOST_AFTER, JOIN_TIMEOUT = "RPC_PIPE_LOST_AFTER", "RPC_PIPE_JOIN_TIMEOUT"
#: seconds between looks whether connections are there
LOOK_EVERY_S = 0.25
_GOODBYE_MS, _MOST_READ = 1000, 2**20


class RemoteWorker:
    """A worker process of another host."""

    def __init__(self, rank: int, host: Host, newcomer: bool) -> None:
        self.rank, self._host = rank, host
        host.send("worker", rank, newcomer)

    def order(self, order: bytes) -> None:
        """Send it an order of the launcher; its host has all of the journal before."""
        self._host.share()
        self._host.send("order", self.rank, order.decode())

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        self._host.send("kill", self.rank)

    def end(self) -> None:
        """Do nothing: its launcher reports its end."""


class Host:
    """Another host, by the connection of its launcher."""

    def __init__(self, hosts: Hosts, identity: bytes, name: str) -> None:
        self.hosts, self._identity, self.name = hosts, identity, name
        #: bytes of the journal that it has
        self.has = 0

    def send(self, *message: Any) -> bool:
        """Send its launcher a message; return whether the connection is there."""
        try:
            self.hosts.socket.send_multipart([self._identity, *frames_of(message)], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def share(self) -> None:
        """Send its launcher the part of the journal that it lacks."""
        self.has = share(self.hosts.journal, self.has, self.send)


class Hosts:
    """The other hosts of a job, as the first host's launcher knows them.

    Args:
        address: of this host, where other launchers connect.
        count: number of hosts with this one.

    Raises:
        OSError: another host has the address, or another launcher listens there.
        ConfigError: it is no address, or there is no key.
    """

    def __init__(self, address: str, count: int, num_workers: int) -> None:
        self._address, self._count, self._num_workers = address, count, num_workers
        (host, port), keys = read_address(address), launcher_keys()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        KeyServer(self._context, keys)
        self.socket = make_socket(self._context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to notice a broken connection
        keys.listen(self.socket, 0)
        try:
            self.socket.bind(spelt(resolved(host)[1][0], port))
        except zmq.ZMQError as error:
            self.socket.close()
            self._context.term()
            raise OSError(error.errno, error.strerror) from error
        self._interface = interface_towards(host)
        self._known: dict[bytes, Host] = {}
        #: hosts without workers, which take the places of the next that die
        self._waiting: list[Host] = []
        #: the workers of other hosts: worker w is on host w mod N, so no host has all replicas of a stage
        self._of: dict[int, Host | None] = {rank: None for rank in range(num_workers) if rank % count}
        self._begun: tuple[Any, ...] = ()
        self._looked_at = 0.0
        #: descriptor of this host's journal (see `checkpoints/newcomer.py`)
        self.journal = -1

    def begin(self, arguments: list[str], attempt: int, folder: Path, look: Callable[[], None]) -> None:
        """Begin an attempt when all hosts have joined.

        Args:
            look: called several times a second.

        Raises:
            ConfigError: a host is missing.
        """
        self.journal = open_journal(folder)
        self._begun = "begin", attempt, self._num_workers, self._count, arguments
        deadline = time.monotonic() + seconds(os.environ, JOIN_TIMEOUT, Job.join_timeout_s)
        while vacant := [rank for rank, host in self._of.items() if host is None]:
            look()
            self.socket.poll(int(1000 * LOOK_EVERY_S))
            for _ in self._messages():
                pass  # of an attempt before
            self._lost()
            if self._waiting:
                self._give(vacant)
            elif time.monotonic() > deadline:
                raise ConfigError(f"--meet {self._address}: not all {self._count} hosts came; type the line on each")
        for host in filter(None, {*self._of.values()}):
            self._begin_on(host)

    def _give(self, vacant: Sequence[int]) -> list[int]:
        """Give a host that has joined the places of one host without processes; return them."""
        ranks = [rank for rank in vacant if rank % self._count == vacant[0] % self._count]
        self._of |= dict.fromkeys(ranks, self._waiting.pop(0))
        return ranks

    def _begin_on(self, host: Host) -> None:
        host.has = 0
        host.send(*self._begun, [rank for rank, on in self._of.items() if on is host])

    def worker(self, rank: int, newcomer: bool) -> RemoteWorker | None:
        """Return a worker that is started on another host; None: it is one of this host."""
        host = self._of.get(rank)
        return None if host is None else RemoteWorker(rank, host, newcomer)

    def can_start(self, rank: int) -> bool:
        """Return whether the host of a worker is there."""
        return self._of.get(rank, self) is not None

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a worker of this host."""
        return variables(self._count, self._interface, range(0, self._num_workers, self._count), rank)

    def events(self, vacant: Sequence[int]) -> Iterator[WorkerEvent]:
        """Yield events of other hosts: events of their workers, and "lost" or "come" for all workers of a host.

        Args:
            vacant: workers without a process; processes may be started in their places.
        """
        for host, message in self._messages():
            with understood(f"host {host.name}"):
                found = self._event(host, *message)
            if found is not None:
                yield found
        if time.monotonic() < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        for host in filter(None, {*self._of.values()}):
            host.share()
        for host, ranks in self._lost():
            if ranks:
                yield WorkerEvent("lost", -1, (ranks, host.name))
        if self._waiting and vacant:
            host = self._waiting[0]
            ranks = self._give(vacant)
            self._begin_on(host)
            yield WorkerEvent("come", -1, (ranks, host.name))

    def _event(self, host: Host, kind: str, *rest: Any) -> WorkerEvent | None:
        """Take a message of another host, which may be an event of one of its workers."""
        if kind == "journal":
            host.has = max(host.has, write_journal(self.journal, *rest))
            return None
        attempt, rank, what, detail = rest
        if kind != "event" or (attempt == self._begun[1] and self._of.get(rank) is not host):
            raise ValueError(f"{kind} of worker {rank}")
        return event_of(rank, what, detail) if attempt == self._begun[1] else None

    def _messages(self) -> Iterator[tuple[Host, list[Any]]]:
        while self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            host = self._known.get(identity)
            match read(frames, "another host" if host is None else f"host {host.name}"):
                case ["hello", str(name)] if host is None:
                    self._known[identity] = Host(self, identity, name)
                    self._waiting.append(self._known[identity])
                case message if host is not None:
                    yield host, message
                case ["hello", *_]:
                    raise ConfigError(f"--meet {self._address}: another host says hello without its name")

    def _lost(self) -> list[tuple[Host, list[int]]]:
        """Forget the hosts without a connection; return them with their workers."""
        lost = [host for host in self._known.values() if not host.send()]
        self._known = {identity: host for identity, host in self._known.items() if host not in lost}
        self._waiting = [host for host in self._waiting if host not in lost]
        found = [(host, [rank for rank, on in self._of.items() if on is host]) for host in lost]
        self._of |= {rank: None for _, ranks in found for rank in ranks}
        return found

    def end(self, code: int) -> None:
        """End the launchers of the other hosts."""
        for host in self._known.values():
            host.send("end", code, f"the job has ended with {code}: its first host shows why" if code else "")
        self.socket.close()
        self._context.term()


# --- of the launchers of all hosts


def read_address(address: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`.

    Raises:
        ConfigError: it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--meet {address}: is no HOST:PORT; type one such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def spelt(host: str, port: int) -> str:
    """Return an address as ZeroMQ reads it."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def launcher_keys() -> Keys:
    """Return the keys of the first host's launcher (0) and of all other launchers (1).

    Raises:
        ConfigError: the environment names no key file, or it holds no secret.
    """
    if KEY not in os.environ:
        raise ConfigError(f"{KEY}: not set; rpc-pipe key FILE makes a key, copy it to all hosts, and set {KEY}=FILE")
    return Keys(read_key(Path(os.environ[KEY])), "launchers", (0, 1))


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Return a socket of launchers; its connections break for good."""
    socket = context.socket(kind)
    lost_after_ms = 1000 * seconds(os.environ, LOST_AFTER, Job.lost_after_s)
    socket.ipv6 = True
    socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = MOST_FRAME_BYTES
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.linger = _GOODBYE_MS
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(lost_after_ms / 8)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(lost_after_ms)))
    return socket


def open_journal(folder: Path) -> int:
    """Return a descriptor of the journal in an attempt's folder, which live workers of this host also write."""
    return os.open(folder / "journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def share(journal: int, has: int, send: Callable[..., object]) -> int:
    """Send another host the journal behind `has` bytes; return how many bytes the host has then."""
    while journal >= 0 and (data := os.pread(journal, _MOST_READ, has)):
        send("journal", has, data.hex())
        has += len(data)
    return has


def variables(count: int, interface: str, here: Sequence[int], rank: int) -> dict[str, str]:
    """Return the environment variables of a worker of a job on several hosts; `here`: the workers of its host."""
    of_host = {HOSTS: str(count), "LOCAL_RANK": str(here.index(rank)), "LOCAL_WORLD_SIZE": str(len(here))}
    return of_host | {"RPC_PIPE_INTERFACE": os.environ.get("RPC_PIPE_INTERFACE", interface)}
