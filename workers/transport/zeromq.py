"""Workers as processes over ZeroMQ: no port and no key inside a host, proved and encrypted between hosts.

    send ──> ROUTER ──────> the peer's DEALER ──> its hearing thread (`Hearing`)

A peer's connection delivers messages in order, or breaks; then the peer is lost. libzmq connects to a lost peer again,
and that connection is not used.
"""

import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import zmq
from torch import Tensor

from ...dependency import ConfigError, EpochEnds, Malformed, NotMet
from .keys import Keys, KeyServer
from .meeting import Meeting
from .message import LinkCallbacks, Message, decode, encode
from .sockets import CONGESTION, Frames, Sockets
from .wakeup import Wakeup, within

#: seconds between two checks of the receiver's thread that the compute thread still receives
_LOOK_S = 0.01


class Hearing:
    """Takes in messages, on a separate thread, and on the compute thread when that waits.

    Args:
        sockets: with messages from peers.
        wakeup: the compute thread sleeps on it, from now on also until a message arrives.
        take_in: called for each message.
        guard: entered for each message.
    """

    def __init__(
        self,
        sockets: Sequence[Sockets],
        wakeup: Wakeup,
        take_in: Callable[[Frames], None],
        guard: AbstractContextManager[None],
    ) -> None:
        self._sockets, self._take_in, self._guard = sockets, take_in, guard
        self._lock = threading.Lock()
        #: the receiver's thread sleeps on it, and the compute thread polls it
        self._sleeps_on, self._looks_at = select.poll(), select.poll()
        for by in sockets:
            self._sleeps_on.register(by.descriptor, select.POLLIN)
            self._looks_at.register(by.descriptor, select.POLLIN)
            wakeup.watch(by.descriptor)
        #: whether the compute thread receives; whether it waits, so receives at once; how often it has received
        self._by_compute = self._waits = False
        self._times = 0
        self._over = False
        threading.Thread(target=self._run, name="hearer", daemon=True).start()

    def wait(self, sleep: Callable[[], bool]) -> bool:
        """Let the compute thread sleep on the wakeup, by calling `sleep`; it is to look then."""
        self._by_compute = self._waits = True
        try:
            return sleep()
        finally:
            self._waits = False

    def look(self) -> None:
        """Take in the messages that have arrived, if the calling compute thread is the receiver."""
        if self._by_compute:
            self._times += 1
            if self._looks_at.poll(0):
                try:
                    self._hear()
                except KeyboardInterrupt:
                    self._hear()  # the descriptor signals new messages only when all have been received
                    raise

    def _hear(self) -> None:
        # Until there is nothing more: the descriptor signals only messages that arrive after that.
        with self._lock:
            for by in self._sockets:
                try:
                    while (pieces := by.hear()) is not None:
                        with self._guard:
                            self._take_in(pieces)
                except zmq.ContextTerminated:
                    self._over = True

    def _run(self) -> None:
        """Receive if the compute thread has not for a while, because it computes or runs the user's code."""
        while not self._over:
            if self._by_compute:
                times = self._times
                time.sleep(_LOOK_S)
                if self._waits or self._times != times:
                    continue
                self._by_compute = False
            with self._guard:
                self._hear()
            if not self._over:
                self._sleeps_on.poll()
        for by in self._sockets:
            by.close_hearing()


_VERSION = 4
#: version, type of the message, its worker, size of the body
_HEAD = struct.Struct("<BBHQ")
#: types: a greeting; a greeting after the peer's has arrived; a message
_THERE, _HEARD, _MESSAGE = 0, 1, 2
#: seconds between greetings, while some peers have not been met
_MEET_S = 0.02
#: seconds for a peer's last messages, which may still be on their way through this process when its connection breaks
_LAST_S = 0.3
_ENDING_S = 1.0


class Network(NamedTuple):
    """How workers of other hosts are reached."""

    keys: Keys
    #: address of this host's interface, and port, 0: any
    host: str
    port: int
    #: where each worker leaves its host's folder and its address
    meeting: Meeting
    #: how long a worker may be silent before it counts as lost
    lost_after_s: float = 20.0
    congestion: str = CONGESTION


class ZmqLink:
    """Joins the group of workers and sends messages over ZeroMQ.

    Args:
        worker: the number of this process among the joining ones.
        workers: the numbers of all that join.
        folder: of the unix sockets of this host's workers; no other user may enter it.
        network: for workers of other hosts; None: there are none.
        join_timeout_s: how long to wait for the other workers.
        cancelled: raises an error when the workers cannot meet any more; None: they can.
    """

    sends_cheaply = True  # a thread of libzmq does the work
    look: Callable[[], None] | None = None

    def __init__(
        self,
        worker: int,
        workers: Iterable[int],
        folder: Path | None,
        network: Network | None = None,
        join_timeout_s: float = 120.0,
        cancelled: Callable[[], None] | None = None,
    ) -> None:
        self.wakeup, self._cancelled = Wakeup(), cancelled
        self._worker, self._peers = worker, set(workers) - {worker}
        self._folder, self._network, self._timeout_s = folder, network, join_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        #: all sockets, and the sockets by which each peer is reached
        self._all: list[Sockets] = []
        self._by: dict[int, Sockets] = {}
        #: peers that this worker has heard, and peers that have heard this worker
        self._met: set[int] = set()
        self._met_by: set[int] = set()
        #: why a process that was met does not belong to this job
        self._misfit = ""

    def open(self, ears: LinkCallbacks) -> None:
        self._ears = ears
        deadline = time.monotonic() + self._timeout_s
        try:
            self._connect(self._folder, self._network, deadline)
            threading.Thread(target=self._watch, name="watcher", daemon=True).start()
            self._hearing = Hearing(self._all, self.wakeup, self._take_in, ears.guard)
            self.look = self._hearing.look
            self._meet(deadline)
        except (ConfigError, EpochEnds, TimeoutError) as error:
            self.close()
            if isinstance(error, EpochEnds):
                raise
            kind = ConfigError if isinstance(error, ConfigError) else NotMet
            many = f"the other {len(self._peers)} workers by ZeroMQ within {timedelta(seconds=self._timeout_s)}"
            raise kind(f"worker {self._worker} could not meet {many}: {error}") from error

    @property
    def refused(self) -> int:
        """How many connections to this worker's port there have been that no worker of the job made."""
        return sum(by.refused for by in self._all)

    # --- meeting

    def _connect(self, folder: Path | None, network: Network | None, deadline: float) -> None:
        """Bind, publish the addresses, and connect to the peers."""
        inside = outside = None
        if folder is not None:
            inside = self._sockets(None, None)
            inside.bind_in(folder)
        if network is not None:
            KeyServer(self._context, network.keys)
            outside = self._sockets(network.keys, network.lost_after_s)
            address = outside.bind_tcp(network.host, network.port, network.congestion)
            place = "" if folder is None else _place(folder)
            network.meeting.leave(f"address-{self._worker}", f"{place}\n{address}")
        for peer in self._peers:
            address = ""
            if network is not None:
                told = network.meeting.take(f"address-{peer}", max(0.0, deadline - time.monotonic()))
                there, _, address = told.partition("\n")
            if inside is not None and folder is not None and (network is None or there == _place(folder)):
                self._by[peer] = inside
                inside.connect_in(folder, peer)
            else:
                assert outside is not None, "there is no way to the others"
                self._by[peer] = outside
                outside.connect_tcp(address, peer)

    def _sockets(self, keys: Keys | None, lost_after_s: float | None) -> Sockets:
        self._all.append(Sockets(self._context, self._worker, keys, lost_after_s))
        return self._all[-1]

    def _meet(self, deadline: float) -> None:
        """Return when this worker has heard all peers, and all peers have heard it."""
        while missing := self._peers - (self._met & self._met_by):
            if self._misfit:
                raise ConfigError(self._misfit)
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was heard of workers {sorted(missing)}")
            if self._cancelled is not None:
                self._cancelled()
            self._greet()
            time.sleep(_MEET_S)
        self._greet()  # again: a peer may not know yet that this worker has met it

    def _greet(self) -> None:
        for peer in self._peers:
            self._say(peer, _HEARD if peer in self._met else _THERE)

    # --- sending

    def send(self, peer: int, message: Message) -> None:
        self._say(peer, _MESSAGE, *encode(message))

    def _say(self, peer: int, what: int, body: bytes = b"", tensors: Sequence[Tensor] = ()) -> None:
        self._by[peer].say(peer, _HEAD.pack(_VERSION, what, self._worker, len(body)), body, tensors)

    # --- hearing: see `Hearing`

    def wait(self, timeout_s: float) -> bool:
        return self._hearing.wait(partial(self.wakeup.wait, timeout_s))

    def _take_in(self, pieces: Frames) -> None:
        if len(pieces.first) < _HEAD.size:
            raise Malformed("malformed message: shorter than its head")
        version, what, peer, size = _HEAD.unpack_from(pieces.first)
        if version != _VERSION or peer not in self._peers:
            self._misfit = f"a message of version {version} of worker {peer}: do all workers run the same rpc-pipe?"
            raise Malformed(self._misfit)
        self._met.add(peer)
        if what == _HEARD:
            self._met_by.add(peer)
        elif what == _MESSAGE:
            body = pieces.first[_HEAD.size :]
            message = decode(body + pieces.read(size - len(body)), pieces.tensor)
            pieces.refuse_rest()
            self._ears.on_message(peer, message)

    # --- watching: a thread that waits until a connection breaks

    def _watch(self) -> None:
        poller = zmq.Poller()
        monitors = {monitor: by for by in self._all for monitor in by.monitors}
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        while True:
            with self._ears.guard:
                try:
                    for monitor, _ in poller.poll():
                        for peer in monitors[monitor].broken(monitor):
                            self._lose(peer)
                except zmq.ContextTerminated:
                    for monitor in monitors:
                        monitor.close(0)
                    return

    def _lose(self, peer: int) -> None:
        if peer in self._met:
            time.sleep(_LAST_S)
            self._ears.on_lost(peer, "its process has ended, or the network is down: the connection broke")

    def close(self) -> None:
        """Send the remaining messages, and end the threads."""
        for by in self._all:
            by.fall_silent()
        with suppress(TimeoutError):  # a thread may be at something that takes longer; it ends with the process
            within(_ENDING_S, self._context.term)
        for by in self._all:
            by.clear_up()


def _place(folder: Path) -> str:
    """Return an identity of the folder that is equal for two workers that see it, under any name."""
    found = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {found.st_dev} {found.st_ino}"
