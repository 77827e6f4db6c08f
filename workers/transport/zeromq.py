"""Workers as processes over ZeroMQ: no port and no key inside a host, proved and encrypted between hosts.

    compute thread, hearer ──_request──> numbered, ROUTER ──────> the peer's DEALER ──> who hears there: handle
    who hears: see `hearing.py` <──────── DEALER <─────────────── the peer's ROUTER

Nothing here is a long poll: a message that says something needs no answer, and of a peer's death its connection tells.
What is said is kept until it has arrived, so a connection may break and come back; see `delivery.py`.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable, Container
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from torch import Tensor

from ...dependency import ConfigError, NotMet
from .carrier import Delivered
from .congestion import CONGESTION
from .deadline import within
from .delivery import Delivery, Said
from .hearing import Hearing
from .keys import Doorkeeper, Keys
from .remote import RemoteCarrier, Reply
from .sockets import Pieces, Sockets
from .values import Malformed, decode_value, encode_value

logger = logging.getLogger(__name__)

_VERSION = 1
#: version, what, who says so, size of the body, number, arrived, followed, request
_HEAD = struct.Struct("<BBHQQQII")
_TICK, _AGAIN, _ANSWER = 0, 1, 2
#: what is asked of a worker, as `RemoteCarrier.handle` knows it
_WHATS = ("", "", "", "exchange", "hurry", "offer", "leave", "look", "clock")
_WITH_TENSORS = ("exchange", "leave")
#: how often silent peers are looked after, and those that have not been met yet
_TICK_S, _MEET_S = 0.5, 0.02
#: what a peer said last may still be on its way through this process when its connection has broken
_LAST_S = 0.3
_PING_S = 30.0
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


class ZmqCarrier(RemoteCarrier):
    """Joins the group of workers and carries pulls over ZeroMQ.

    Args:
        worker: this process's rank.
        num_workers: how many join; the call returns when all have.
        folder: of this host's workers, which nobody else may enter: their unix sockets are there.
        network: for workers of other hosts; None: there are none.
        join_timeout_s: for how long to wait for the others.
        shared_memory: whether workers of one host answer each other through it, where that is possible.

    Raises:
        ConfigError: the others did not come, or could not be who they said they were.
    """

    _sends_cheaply = True  # libzmq's own thread does

    def __init__(
        self,
        worker: int,
        num_workers: int,
        folder: Path | None,
        network: Network | None = None,
        join_timeout_s: float = 120.0,
        *,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(worker, num_workers, shared_memory=shared_memory)
        #: what is shown to those who watch from other machines; see rpc_pipe/tracing/mirror.py
        self.serve_board: Callable[[int], bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peers = [peer for peer in range(num_workers) if peer != worker]
        self._deliveries = {peer: Delivery() for peer in peers}
        #: all that there are, and those by which each peer is talked to
        self._all: list[Sockets] = []
        self._by: dict[int, Sockets] = {}
        self._lost_after_s = network.lost_after_s if network is not None else _TICK_S
        self._requests = itertools.count(1)
        #: by request, who was asked and what is done with the answer
        self._awaited: dict[int, tuple[int, Callable[[Any], None]]] = {}
        #: those heard, and those that have heard this worker
        self._met: set[int] = set()
        self._met_by: set[int] = set()
        #: how often peers have looked whether this worker is there
        self._probed_by: dict[int, int] = {}
        #: since when connections are broken
        self._broken_since: dict[int, float] = {}
        #: of these, the ones that have been told of
        self._told_broken: set[int] = set()
        self._ending = False
        deadline = time.monotonic() + join_timeout_s
        try:
            self._connect(folder, network, deadline)
            threading.Thread(target=self._watch, name="watcher", daemon=True).start()
            self._hearing = Hearing(self._all, self.channels.wakeup, self._take_in, self.answering_for_errors)
            self._meet(deadline)
        except (ConfigError, TimeoutError) as error:
            self._end()
            kind = ConfigError if isinstance(error, ConfigError) else NotMet
            raise kind(
                f"worker {worker} could not meet the other {num_workers - 1} workers by ZeroMQ "
                f"within {timedelta(seconds=join_timeout_s)}: {error}"
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
        self._all.append(Sockets(self._context, self.worker, keys, lost_after_s))
        return self._all[-1]

    def _meet(self, deadline: float) -> None:
        """Return when this worker has heard all others, and they it."""
        while missing := self._deliveries.keys() - (self._met & self._met_by):
            if self._fault is not None:
                raise ConfigError(str(self._fault))
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

    def _request(self, peer: int, what: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        body: bytes = args[0] if args else b""
        tensors: list[Tensor] = args[1] if what in _WITH_TENSORS else []
        request = 0
        if what != "exchange":
            request = next(self._requests)
            self._awaited[request] = peer, then
        self._put(peer, (_WHATS.index(what), request, body, tensors))

    def _put(self, peer: int, content: tuple[int, int, bytes, list[Tensor]]) -> None:
        by = self._by[peer]
        with by.lock:
            self._say_numbered(peer, self._deliveries[peer].say(content), content)

    def _say_numbered(self, peer: int, said: Said, content: tuple[int, int, bytes, list[Tensor]]) -> None:
        what, request, body, tensors = content
        self._by[peer].say(peer, self._head(what, len(body), said, request), body, tensors)

    def _head(self, what: int, size: int, said: Said, request: int) -> bytes:
        return _HEAD.pack(_VERSION, what, self.worker, size, *said, request)

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

    def poll(self, runs: Container[int]) -> list[Delivered]:
        self._hearing.look()
        return super().poll(runs)

    def _sleep(self, timeout_s: float) -> bool:
        woken = self._hearing.wait(partial(super()._sleep, timeout_s))
        self._sleeps = False  # nobody is to be woken for what is heard now
        self._hearing.look()
        return woken

    def _take_in(self, pieces: Pieces) -> None:
        try:
            version, what, peer, size, number, arrived, followed, request = _HEAD.unpack_from(pieces.first)
        except struct.error as error:
            raise Malformed(f"malformed message: {error}") from error
        if version != _VERSION or peer not in self._deliveries:
            raise Malformed(f"a message of version {version} of worker {peer}: do all workers run the same rpc-pipe?")
        delivery, said = self._deliveries[peer], Said(number, arrived, followed)
        self._met.add(peer)
        if what == _AGAIN:
            with self._by[peer].lock:
                for again, content in delivery.again(request, arrived):
                    self._say_numbered(peer, again, content)
            return
        if what == _TICK:
            self._ticked(peer, said, request)
        elif delivery.take(said, pieces.num_bytes):
            body = pieces.first[_HEAD.size :]
            self._handle(peer, what, request, body + pieces.read(size - len(body)), pieces)
        if (missed := delivery.gap(said)) is not None:
            self._ask_again(peer, missed)
        elif delivery.owes:
            self._tick(peer)

    def _ticked(self, peer: int, said: Said, news: int) -> None:
        self._deliveries[peer].ticked(said)
        self._probed_by[peer] = news >> 1
        if news & 1:
            self._met_by.add(peer)

    def _handle(self, peer: int, what: int, request: int, body: bytes, pieces: Pieces) -> None:
        if what == _ANSWER:
            awaited = self._awaited.pop(request, None)
            if awaited is not None:
                awaited[1](decode_value(body))
            return
        if what >= len(_WHATS) or not _WHATS[what]:
            raise Malformed(f"malformed message: worker {peer} asks for {what}")
        name = _WHATS[what]
        reply: Reply | None = partial(self._reply, peer, request) if request else None
        if name in _WITH_TENSORS:
            self.handle(name, peer, reply, body, pieces.tensor)
        elif reply is None:
            raise Malformed(f"malformed message: worker {peer} wants no answer to {name}")
        elif name == "look":
            reply(b"" if self.serve_board is None else self.serve_board(decode_value(body)))
        elif name == "clock":
            reply(time.perf_counter_ns())
        else:
            self.handle(name, peer, reply, *([body] if name == "offer" else []))

    def _gone(self, peer: int) -> None:
        super()._gone(peer)
        for request, (asked, then) in list(self._awaited.items()):
            if asked == peer and self._awaited.pop(request, None) is not None:
                then(RuntimeError(f"worker {peer} has left"))

    def _reply(self, peer: int, request: int, value: Any) -> None:
        self._put(peer, (_ANSWER, request, encode_value(value), []))

    # --- watching: a thread that wakes up twice a second

    def _watch(self) -> None:
        poller = zmq.Poller()
        monitors = {monitor: by for by in self._all for monitor in by.monitors}
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        looked = time.monotonic()
        while True:
            with self.answering_for_errors:
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
            if peer in self._told_broken:
                self._told_broken.remove(peer)
                logger.warning("worker %d: the connection to worker %d is back", self.worker, peer)
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
                    "come back within %g s", self.worker, peer, self._lost_after_s,
                )  # fmt: skip
        for peer, delivery in self._deliveries.items():
            if peer in self._met and peer not in self._lost and delivery.is_open:
                self._tick(peer)
                if (missed := delivery.unanswered) is not None:
                    self._ask_again(peer, missed)

    def _lose(self, peer: int, why: str) -> None:
        self._broken_since.pop(peer, None)
        self._failed(peer, why)

    # --- for those who watch from other machines

    def look(self, peer: int, seen: int) -> futures.Future[bytes]:
        """Ask for what `peer` exhibits."""
        return self._ask_for(peer, "look", encode_value(seen))

    def _clock_of(self, peer: int) -> int:
        try:
            now: int = self._ask_for(peer, "clock", b"").result(_PING_S)
        except futures.TimeoutError as error:
            raise RuntimeError("no answer") from error
        return now

    def _ask_for(self, peer: int, what: str, body: bytes) -> futures.Future[Any]:
        if peer in self._lost or self.exchange(peer).closed or self._ending:
            raise RuntimeError(f"worker {peer} cannot be reached")
        answer: futures.Future[Any] = futures.Future()

        def came(value: Any) -> None:
            if isinstance(value, RuntimeError):
                answer.set_exception(value)
            else:
                answer.set_result(value)

        self._request(peer, what, (body,), came)
        return answer

    def close(self) -> None:
        self._tick_all()  # ahead of the goodbye, behind which peers count whom they have refused
        super().close()
        self._end()

    def _end(self) -> None:
        """Send what has been said, and end the threads."""
        self._ending = True
        for by in self._all:
            by.fall_silent()
        with suppress(TimeoutError):  # a thread may be at something that takes longer; it ends with the process
            within(_ENDING_S, self._context.term)


def _place(folder: Path) -> str:
    """Return what two workers have alike if they see the same folder, whatever it is called."""
    found = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {found.st_dev} {found.st_ino}"
