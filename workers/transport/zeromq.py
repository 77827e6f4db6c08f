"""Workers as processes over ZeroMQ: no port and no key inside a host, proved and encrypted between hosts.

    send ──> numbered, ROUTER ──────> the peer's DEALER ──> who hears there: see `hearing.py`

Of a peer's death its connection tells. What is said is kept until it has arrived, so a connection may break and come
back; see `delivery.py`.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import zmq
from torch import Tensor

from ...dependency import ConfigError, NotMet
from .congestion import CONGESTION
from .deadline import within
from .delivery import Delivery, Said
from .hearing import Hearing
from .keys import Doorkeeper, Keys
from .link import Ears, Message
from .message import decode, encode
from .sockets import Pieces, Sockets
from .values import Malformed
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

_VERSION = 2
#: version, what, who says so, size of the body, number, arrived, followed; of ticks and requests, more
_HEAD = struct.Struct("<BBHQQQII")
_TICK, _AGAIN, _MESSAGE = 0, 1, 2
#: how often silent peers are looked after, and those that have not been met yet
_TICK_S, _MEET_S = 0.5, 0.02
#: what a peer said last may still be on its way through this process when its connection has broken
_LAST_S = 0.3
_ENDING_S = 1.0


class Network(NamedTuple):
    """How workers of other hosts are reached."""

    keys: Keys
    #: address of this host's interface, and port, 0: any
    host: str
    port: int
    #: tells the others where this worker is: its host's folder, and its address
    tell: Callable[[str, str], None]
    #: returns what a worker told, or raises TimeoutError
    ask: Callable[[int, float], tuple[str, str]]
    #: how long a connection may be broken before the worker counts as lost; a silent one is broken after 5/8 of that
    lost_after_s: float = 20.0
    congestion: str = CONGESTION


class ZmqLink:
    """Joins the group of workers and sends messages over ZeroMQ.

    Args:
        worker: this process's rank.
        num_workers: how many join.
        folder: of this host's workers, which nobody else may enter: their unix sockets are there.
        network: for workers of other hosts; None: there are none.
        join_timeout_s: for how long to wait for the others.
    """

    sends_cheaply = True  # libzmq's own thread does
    look: Callable[[], None] | None = None

    def __init__(
        self,
        worker: int,
        num_workers: int,
        folder: Path | None,
        network: Network | None = None,
        join_timeout_s: float = 120.0,
    ) -> None:
        self.wakeup = Wakeup()
        self._worker, self._num_workers = worker, num_workers
        self._folder, self._network, self._timeout_s = folder, network, join_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peers = [peer for peer in range(num_workers) if peer != worker]
        self._deliveries = {peer: Delivery() for peer in peers}
        #: all that there are, and those by which each peer is talked to
        self._all: list[Sockets] = []
        self._by: dict[int, Sockets] = {}
        self._lost_after_s = network.lost_after_s if network is not None else _TICK_S
        #: those heard, and those that have heard this worker
        self._met: set[int] = set()
        self._met_by: set[int] = set()
        #: how often peers have looked whether this worker is there
        self._probed_by: dict[int, int] = {}
        #: since when connections are broken
        self._broken_since: dict[int, float] = {}
        #: of these, the ones that have been told of
        self._told_broken: set[int] = set()
        #: those that are lost
        self._lost: set[int] = set()
        #: why one of those that are met is none of this job
        self._misfit = ""

    def open(self, ears: Ears) -> None:
        self._ears = ears
        deadline = time.monotonic() + self._timeout_s
        try:
            self._connect(self._folder, self._network, deadline)
            threading.Thread(target=self._watch, name="watcher", daemon=True).start()
            self._hearing = Hearing(self._all, self.wakeup, self._take_in, ears.guard)
            self.look = self._hearing.look
            self._meet(deadline)
        except (ConfigError, TimeoutError) as error:
            self._end()
            kind = ConfigError if isinstance(error, ConfigError) else NotMet
            raise kind(
                f"worker {self._worker} could not meet the other {self._num_workers - 1} workers by ZeroMQ "
                f"within {timedelta(seconds=self._timeout_s)}: {error}"
            ) from error

    @property
    def refused(self) -> int:
        """How many connections to this worker's port there have been that no worker of the job made."""
        return max(0, sum(by.refused for by in self._all) - sum(self._probed_by.values()))

    # --- meeting

    def _connect(self, folder: Path | None, network: Network | None, deadline: float) -> None:
        """Bind, tell the others where, and connect to them."""
        inside = outside = None
        if folder is not None:
            inside = self._sockets(None, None)
            inside.bind_in(folder)
        if network is not None:
            Doorkeeper(self._context, network.keys)
            outside = self._sockets(network.keys, network.lost_after_s)
            address = outside.bind_tcp(network.host, network.port, network.congestion)
            network.tell("" if folder is None else _place(folder), address)
        for peer in self._deliveries:
            address = ""
            if network is not None:
                there, address = network.ask(peer, max(0.0, deadline - time.monotonic()))
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
        """Return when this worker has heard all others, and they it."""
        while missing := self._deliveries.keys() - (self._met & self._met_by):
            if self._misfit:
                raise ConfigError(self._misfit)
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was heard of workers {sorted(missing)}")
            self._tick_all()
            time.sleep(_MEET_S)
        self._tick_all()

    def _tick_all(self) -> None:
        """Tick also those that are met and heard: they may not know yet that they are."""
        for peer in self._deliveries:
            self._tick(peer)

    # --- saying

    def send(self, peer: int, message: Message) -> None:
        content = encode(message)
        by = self._by[peer]
        with by.lock:
            self._say_numbered(peer, self._deliveries[peer].say(content), content)

    def _say_numbered(self, peer: int, said: Said, content: tuple[bytes, list[Tensor]]) -> None:
        body, tensors = content
        self._by[peer].say(peer, self._head(_MESSAGE, len(body), said), body, tensors)

    def _head(self, what: int, size: int, said: Said, more: int = 0) -> bytes:
        return _HEAD.pack(_VERSION, what, self._worker, size, *said, more)

    def _tick(self, peer: int) -> None:
        """Say how far one has come, so that the peer sees what it has missed, and how often it was probed."""
        by = self._by[peer]
        with by.lock:
            news = by.probes[peer] << 1 | (peer in self._met)
            by.say(peer, self._head(_TICK, 0, self._deliveries[peer].tick(), news))

    def _ask_again(self, peer: int, request: int) -> None:
        by = self._by[peer]
        with by.lock:
            by.say(peer, self._head(_AGAIN, 0, self._deliveries[peer].tick(), request))

    # --- hearing: see `hearing.py`

    def wait(self, timeout_s: float) -> bool:
        return self._hearing.wait(partial(self.wakeup.wait, timeout_s))

    def _take_in(self, pieces: Pieces) -> None:
        try:
            version, what, peer, size, number, arrived, followed, more = _HEAD.unpack_from(pieces.first)
        except struct.error as error:
            raise Malformed(f"malformed message: {error}") from error
        if version != _VERSION or peer not in self._deliveries:
            self._misfit = f"a message of version {version} of worker {peer}: do all workers run the same rpc-pipe?"
            raise Malformed(self._misfit)
        delivery, said = self._deliveries[peer], Said(number, arrived, followed)
        self._met.add(peer)
        if what == _AGAIN:
            with self._by[peer].lock:
                for again, content in delivery.again(more, arrived):
                    self._say_numbered(peer, again, content)
            return
        if what == _TICK:
            self._ticked(peer, said, more)
        elif delivery.take(said, pieces.num_bytes):
            body = pieces.first[_HEAD.size :]
            self._ears.on_message(peer, decode(body + pieces.read(size - len(body)), pieces.tensor))
        if (missed := delivery.gap(said)) is not None:
            self._ask_again(peer, missed)
        elif delivery.owes:
            self._tick(peer)

    def _ticked(self, peer: int, said: Said, news: int) -> None:
        self._deliveries[peer].ticked(said)
        self._probed_by[peer] = news >> 1
        if news & 1:
            self._met_by.add(peer)

    # --- watching: a thread that wakes up twice a second

    def _watch(self) -> None:
        poller = zmq.Poller()
        monitors = {monitor: by for by in self._all for monitor in by.monitors}
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        looked = time.monotonic()
        while True:
            with self._ears.guard:
                try:
                    for monitor, _ in poller.poll(int(1000 * _TICK_S)):
                        for change in monitors[monitor].changes(monitor):
                            self._changed(*change)
                except zmq.ContextTerminated:
                    for monitor in monitors:
                        monitor.close(0)
                    return
                # Not at each event: a peer that probes whether this worker is there makes one, and is probed then.
                if time.monotonic() >= looked + _LAST_S:
                    looked = time.monotonic()
                    self._look_after()

    def _changed(self, peer: int, connected: bool) -> None:
        if connected:
            self._broken_since.pop(peer, None)
            self._tick(peer)  # it has been probed, maybe
            if peer in self._told_broken:
                self._told_broken.remove(peer)
                logger.warning("worker %d: the connection to worker %d is back", self._worker, peer)
        elif peer in self._met:
            self._broken_since.setdefault(peer, time.monotonic())

    def _look_after(self) -> None:
        now = time.monotonic()
        for peer, since in list(self._broken_since.items()):
            if now < since + _LAST_S:
                continue
            if self._by[peer].is_gone(peer):
                self._lose(peer, "its process has ended: the connection broke and nobody listens any more")
            elif now > since + self._lost_after_s:
                self._lose(peer, f"it does not answer: no connection for {now - since:.0f} s")
            elif peer not in self._told_broken:
                self._told_broken.add(peer)
                logger.warning(
                    "worker %d: the connection to worker %d is broken; the worker counts as lost if it does not "
                    "come back within %g s", self._worker, peer, self._lost_after_s,
                )  # fmt: skip
        for peer, delivery in self._deliveries.items():
            if peer in self._met and peer not in self._lost and delivery.is_open:
                self._tick(peer)
                if (missed := delivery.unanswered) is not None:
                    self._ask_again(peer, missed)

    def _lose(self, peer: int, why: str) -> None:
        self._broken_since.pop(peer, None)
        self._lost.add(peer)
        self._ears.on_lost(peer, why)

    def close(self) -> None:
        self._tick_all()  # so that peers count whom they have refused
        self._end()

    def _end(self) -> None:
        """Send what has been said, and end the threads."""
        for by in self._all:
            by.fall_silent()
        with suppress(TimeoutError):  # a thread may be at something that takes longer; it ends with the process
            within(_ENDING_S, self._context.term)


def _place(folder: Path) -> str:
    """Return what two workers have alike if they see the same folder, whatever it is called."""
    found = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {found.st_dev} {found.st_ino}"
