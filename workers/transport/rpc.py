"""Workers as processes over `torch.distributed.rpc` (TensorPipe). The only file that imports it.

A pull is a long poll, and what is said in both directions shares messages: see `exchange.py`. The handler of a
request returns a future that is completed when there is something to say, so it holds no thread and
computes nothing. Serialisation and hand-over to TensorPipe take 100 to 300 us a message, waking another thread
30 us and then some 100 us of latency. So what the compute thread has to say it sends itself when it would wait
anyway, and leaves to the sender's thread when it has something to compute. Answers to a worker of the same host
take a shorter way: see `shared_memory.py`.

Options by measurement on one host, torch 2.13 (round trip of 256 KiB; CPU of an idle agent):
the default shm transport 396 us but 1.0 core of busy polling per process; uv 604 us and no idle CPU. With as
many workers as cores the first starves the compute, so: `uv`, and the `basic` channel (cma needs ptrace
rights that containers lack and aborts without them, pytorch#54266).
"""

from __future__ import annotations

import ctypes
import pickle
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch._C._distributed_rpc import _invoke_rpc_python_udf
from torch.distributed import rpc
from torch.distributed.rpc.api import _default_pickler
from torch.distributed.rpc.internal import PythonUDF
from torch.futures import Future

from ...dependency import ConfigError, PipeError
from .carrier import LEFT, Deliver
from .exchange import NOTHING, Exchange, Message
from .message import decode, encode
from .outbox import Answer, Key, Outbox
from .payload import Payload
from .shared_memory import Channels, Offer
from .wakeup import Wakeup

#: handlers do not block, so few are enough for any number of workers
_RPC_THREADS = 2
_NO_TIMEOUT = 0.0
_PING_S = 30.0
#: how long a leaving worker waits for the others to take what it has made
_DRAIN_S = 300.0
#: how often it looks whether they have, at least
_LOOK_EVERY_S = 1.0
#: how long a leaving worker waits for the others to read its last message
_LEAVE_S = 5.0

_endpoint: RpcCarrier | None = None
_pinned = threading.local()


def _name(worker: int) -> str:
    return f"worker{worker}"


def _pin_thread_state() -> None:
    """Keep this RPC thread's Python state, which is else made and destroyed with every message (40 us each)."""
    if not getattr(_pinned, "done", False):
        ctypes.pythonapi.PyGILState_Ensure()
        _pinned.done = True


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _exchange(peer: int, *wire: Any) -> Future[Any]:
    """Runs at the receiver of a message: a future of the message that answers it."""
    assert _endpoint is not None
    _pin_thread_state()
    future: Future[Any] = Future()
    _endpoint.exchange(peer).hold(future)
    _endpoint.received(peer, decode(*wire), own=False)
    return future


def _offered(peer: int, data: bytes, _: list[Tensor]) -> bool:
    """Runs at who may answer `peer` through shared memory from now on; returns whether it will."""
    return _endpoint is not None and _endpoint.channels.accept(peer, pickle.loads(data))


def _leave(peer: int, *wire: Any) -> None:
    """Runs at the receiver of `peer`'s last message."""
    if _endpoint is not None:
        _endpoint.received(peer, decode(*wire), own=False)
        _endpoint.gone(peer)
        _answer_all(_endpoint.exchange(peer).close())
        _endpoint.lost(peer, LEFT)


def _hurry(peer: int, *_: Any) -> None:
    """Runs at who is to tell `peer` now what has arrived from it."""
    if _endpoint is not None:
        _endpoint.exchange(peer).flush()
        _endpoint.post(peer)


def _answer_all(held: list[Future[Any]]) -> None:
    """Give requests back without a word, so that none breaks when this worker or its peer leaves."""
    for future in held:
        future.set_result(encode(NOTHING))


def _clock() -> int:
    return time.perf_counter_ns()


def _look(seen: int) -> bytes:
    """Runs at a worker that is watched from another machine."""
    return b"" if _endpoint is None or _endpoint.exhibit is None else _endpoint.exhibit(seen)


class RpcCarrier:
    """Joins the group of workers and carries pulls over RPC. One for the life of a process.

    Args:
        worker: this process's rank.
        num_workers: how many join; the call returns when all have.
        init_method: where they meet: `file:///path`, `tcp://host:port` or `env://`.
        join_timeout_s: for how long to wait for the others.
        shared_memory: whether workers of one host answer each other through it, where that is possible.

    Raises:
        ConfigError: the others did not come, or the address cannot be used.
    """

    def __init__(
        self,
        worker: int,
        num_workers: int,
        init_method: str,
        join_timeout_s: float = 120.0,
        *,
        shared_memory: bool = True,
    ) -> None:
        global _endpoint
        self.worker = worker
        self.num_workers = num_workers
        self.outbox = Outbox()
        self._exchanges: dict[int, Exchange] = {}
        self._posted: deque[int] = deque()  # peers that the compute thread has something to say to
        self._broken: deque[tuple[int, str]] = deque()  # peers that cannot be reached, and why
        self._compute_thread = threading.get_ident()
        self._to_send: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # peers; None: no more
        self._infos: dict[int, Any] = {}
        self._closed = False
        #: to and from workers of this host
        self.channels = Channels(Wakeup(), wanted=shared_memory)
        #: what is shown to those who watch from other machines; see rpc_pipe/tracing/mirror.py
        self.exhibit: Callable[[int], bytes] | None = None
        _endpoint = self
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_RPC_THREADS,
            rpc_timeout=join_timeout_s,
            init_method=init_method,
            _transports=["uv"],
            _channels=["basic"],
        )
        try:
            with warnings.catch_warnings():
                # init_rpc itself uses a gloo group in a way that torch deprecates
                warnings.filterwarnings("ignore", message="You are using a Backend")
                rpc.init_rpc(_name(worker), rank=worker, world_size=num_workers, rpc_backend_options=options)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"worker {worker} could not meet the other {num_workers - 1} workers at {init_method} "
                f"within {timedelta(seconds=join_timeout_s)}: {error}"
            ) from error
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)
        self._sender.start()

    def exchange(self, peer: int) -> Exchange:
        """This worker's end of its exchange with `peer`."""
        exchange = self._exchanges.get(peer)
        # setdefault, in one step of the interpreter: handlers and the compute thread may both come first
        return self._exchanges.setdefault(peer, Exchange()) if exchange is None else exchange

    def say(self, peer: int, key: Key) -> None:
        self.exchange(peer).say(key)

    def pull(self, peer: int, questions: Mapping[Key, Deliver], *, polled: bool) -> None:
        if polled:
            self._send_offer(peer, self.channels.offer(peer))
        self.exchange(peer).ask(questions)
        self.post(peer)
        if self.exchange(peer).closed:
            self.lost(peer, LEFT)

    def _send_offer(self, peer: int, offer: Offer | None) -> None:
        if offer is None:
            return

        def decided(future: Future[Any]) -> None:
            with suppress(RuntimeError):  # gone; the exchange will tell
                if not future.value():
                    self.channels.refused(peer)

        with suppress(RuntimeError):
            self._request(peer, _offered, (pickle.dumps(offer), []), _PING_S).add_done_callback(decided)

    def poll(self) -> None:
        for peer, (key, answer, at_ns) in self.channels.read():
            deliver = self.exchange(peer).answered(key)
            if deliver is not None:
                deliver(answer, at_ns)
        while self._broken:  # after what the peer had still answered
            peer, text = self._broken.popleft()
            for deliver in self.exchange(peer).broken():
                deliver(text, time.perf_counter_ns())

    def wait(self, timeout_s: float) -> bool:
        return self.channels.wakeup.wait(timeout_s)

    def wake(self) -> None:
        if threading.get_ident() != self._compute_thread:
            self.channels.wakeup.notify()

    def gone(self, peer: int) -> None:
        """`peer` takes nothing more."""
        self.channels.gone(peer)
        self.outbox.leaves(peer)

    def flush(self) -> None:
        for peer, exchange in list(self._exchanges.items()):
            exchange.flush()
            self.post(peer)

    def dispatch(self, busy: bool) -> None:
        self._compute_thread = threading.get_ident()
        while self._posted:
            peer = self._posted.popleft()
            if busy:
                self._to_send.put(peer)
            else:
                self._send(peer)

    def received(self, peer: int, message: Message, own: bool) -> None:
        """Take in a message of `peer`; `own`: it answers a request of this worker."""
        for deliver, answer in self.exchange(peer).received(message, own):
            deliver(answer, time.perf_counter_ns())
            if isinstance(answer, PipeError):
                self.channels.gone(peer)
            elif isinstance(answer, Payload):
                self._send_offer(peer, self.channels.offer_larger(peer, answer.num_bytes))
        self.outbox.taken(message.taken, peer)
        for key in message.asks:
            self.outbox.ask(key, peer, partial(self._answer, peer, key))
        self.post(peer)

    def _answer(self, peer: int, key: Key, answer: Answer) -> None:
        if self.channels.write(peer, key, answer):
            self.outbox.taken([key], peer)  # it is in the peer's memory
            return
        self.exchange(peer).answer(key, answer)
        self.post(peer)

    def post(self, peer: int) -> None:
        """Have said what there is to say to `peer`."""
        if not self.exchange(peer).urgent:
            return
        if threading.get_ident() == self._compute_thread:
            self._posted.append(peer)
        else:
            self._send(peer)

    def _send_all(self) -> None:
        """The sender's thread."""
        while (peer := self._to_send.get()) is not None:
            self._send(peer)

    def _send(self, peer: int) -> None:
        outgoing = self.exchange(peer).outgoing()
        if outgoing is None:
            return
        wire = encode(outgoing.message)
        if outgoing.held is not None:
            outgoing.held.set_result(wire)
            return
        try:
            future = self._request(peer, _exchange, wire, _NO_TIMEOUT, is_async=True)
        except RuntimeError as error:
            self._failed(peer, str(error))
        else:
            future.add_done_callback(partial(self._answered, peer))

    def _request(
        self, peer: int, handler: Callable[..., Any], wire: tuple[Any, ...], timeout_s: float, is_async: bool = False
    ) -> Future[Any]:
        """As `rpc_async`, less what it does for other kinds of functions, profilers and tensors inside (15 %)."""
        info = self._infos.get(peer)
        if info is None:
            info = self._infos[peer] = rpc.get_worker_info(_name(peer))
        data, large = wire
        # With tensors beside it the pickle must be torch's, which refers to them by number.
        call = PythonUDF(handler, (self.worker, data, large), {})
        if large:
            pickled, tensors = _default_pickler.serialize(call)
        else:
            pickled, tensors = pickle.dumps(call, pickle.HIGHEST_PROTOCOL), []
        future: Future[Any] = _invoke_rpc_python_udf(info, pickled, tensors, timeout_s, is_async)
        return future

    def _answered(self, peer: int, future: Future[Any]) -> None:
        _pin_thread_state()
        try:
            wire = future.value()
        except RuntimeError as error:
            self._failed(peer, str(error))
        else:
            self.received(peer, decode(*wire), own=True)

    def _failed(self, peer: int, text: str) -> None:
        line = self.exchange(peer)
        if self._closed or line.closed:  # who has said goodbye is not missed
            return
        self.gone(peer)
        # Goodbye is said to those one has talked to.
        self.lost(peer, text.strip().split("\n")[0] if line.heard else LEFT)

    def lost(self, peer: int, text: str) -> None:
        """Give up what `peer` was asked and has not answered, once what it did answer has been read."""
        self._broken.append((peer, text))
        self.channels.wakeup.notify()

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Of eight pings the fastest counts, as its asymmetry can be the least (Cristian 1989)."""
        best = (0, 2**62)
        for _ in range(8):
            sent = time.perf_counter_ns()
            there: int = rpc.rpc_sync(_name(peer), _clock, timeout=_PING_S)
            error = (time.perf_counter_ns() - sent) // 2
            if error < best[1]:
                best = there - (sent + error), error
        return best

    def look(self, peer: int, seen: int) -> Future[bytes]:
        """Ask for what `peer` exhibits."""
        answer: Future[bytes] = rpc.rpc_async(_name(peer), _look, args=(seen,), timeout=_PING_S)
        return answer

    def close(self) -> None:
        # Not graceful: that is a barrier over all workers, which hangs if one is gone (pytorch#63247).
        # First the others take what this worker has made. Its last words may then have been an answer that is
        # still under way, and the peers wait for them; so it says goodbye.
        self.outbox.end(self.worker)
        self._drain()
        self._closed = True
        self._to_send.put(None)
        self._sender.join(_LEAVE_S)
        deadline = time.monotonic() + _LEAVE_S
        goodbyes = [self._say_goodbye(peer, exchange) for peer, exchange in list(self._exchanges.items())]
        while not all(future.done() for future in goodbyes if future) and time.monotonic() < deadline:
            time.sleep(0.005)
        rpc.shutdown(graceful=False)

    def settle(self, timeout_s: float) -> None:
        deadline, pause = time.monotonic() + timeout_s, 0.001
        while self.channels.unread() and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_EVERY_S)

    def _drain(self) -> None:
        """Wait until all has been taken. A peer may have no other reason to say so soon, so it is asked."""
        self.dispatch(busy=False)
        deadline, pause = time.monotonic() + _DRAIN_S, 0.01
        while (waiting := self._waiting()) and time.monotonic() < deadline:
            for peer in waiting:
                with suppress(RuntimeError):  # gone; its broken requests tell so
                    self._request(peer, _hurry, encode(NOTHING), _PING_S)
            self.poll()  # the others may be leaving too
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_EVERY_S)

    def _waiting(self) -> set[int]:
        return set() if self.outbox.failed else self.outbox.waiting() | self.channels.unread()

    def _say_goodbye(self, peer: int, exchange: Exchange) -> Future[Any] | None:
        wire = encode(exchange.last_words())
        _answer_all(exchange.close())
        try:
            return self._request(peer, _leave, wire, _LEAVE_S)
        except RuntimeError:
            return None  # it has left before
