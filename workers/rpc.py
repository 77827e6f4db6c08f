"""Workers as processes over `torch.distributed.rpc` (TensorPipe). The only file that imports it.

A pull is a long poll: one request, and one answer when the payload is there. The handler returns a future
that the peer's compute thread completes, so it holds no thread and computes nothing. What has arrived is
acknowledged with the next request to the same peer, or alone if no request is left to carry it.

Options by measurement on one host, torch 2.13 (round trip of 256 KiB; CPU of an idle agent):
the default shm transport 396 us but 1.0 core of busy polling per process; uv 604 us and no idle CPU. With as
many workers as cores the first starves the compute, so: `uv`, and the `basic` channel (cma needs ptrace
rights that containers lack and aborts without them, pytorch#54266).
"""

from __future__ import annotations

import threading
import time
import warnings
from datetime import timedelta
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from ..dependency import ConfigError
from .outbox import Answer, Key, Outbox
from .payload import Payload
from .transport import Deliver

#: after so long an unanswered pull is asked again; also the longest that a lost answer goes unnoticed
_LONG_POLL_S = 30.0
#: handlers do not block, so few are enough for any number of workers
_RPC_THREADS = 4
#: so many payloads may stay at a producer after their arrival, for want of a request that carries the news
_UNTOLD_LIMIT = 4
#: how long a leaving worker waits for its last acknowledgements to be read
_LEAVE_S = 5.0

_endpoint: RpcTransport | None = None


def _name(worker: int) -> str:
    return f"worker{worker}"


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _answer(consumer: int, key: Key, taken: list[Key]) -> Future[Any]:
    """Runs at the producer: a future of what `key` holds."""
    assert _endpoint is not None
    future: Future[Any] = Future()

    def reply(answer: Answer) -> None:
        if isinstance(answer, Payload):
            future.set_result((answer.tensors, answer.skeleton))
        else:
            future.set_result(answer)

    _endpoint.outbox.taken(taken, consumer)
    _endpoint.outbox.ask(key, consumer, reply)
    return future


def _taken(consumer: int, keys: list[Key]) -> None:
    """Runs at the producer: `keys` have arrived at `consumer`."""
    if _endpoint is not None:
        _endpoint.outbox.taken(keys, consumer)


def _clock() -> int:
    return time.perf_counter_ns()


class RpcTransport:
    """Joins the group of workers and carries pulls over RPC. One for the life of a process.

    Args:
        worker: this process's rank.
        num_workers: how many join; the call returns when all have.
        init_method: where they meet: `file:///path`, `tcp://host:port` or `env://`.
        join_timeout_s: for how long to wait for the others.

    Raises:
        ConfigError: the others did not come, or the address cannot be used.
    """

    def __init__(self, worker: int, num_workers: int, init_method: str, join_timeout_s: float = 120.0) -> None:
        global _endpoint
        self.worker = worker
        self.num_workers = num_workers
        self.outbox = Outbox()
        self._lock = threading.Lock()
        self._untold: dict[int, list[Key]] = {}  # peer -> arrived keys that it has not been told of
        self._open: dict[int, int] = {}  # peer -> pulls without answer
        self._acks_due = 0  # acknowledgements that are to be sent or have not been read yet
        self._closed = False
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

    def pull(self, peer: int, key: Key, deliver: Deliver) -> None:
        with self._lock:
            taken = self._untold.pop(peer, [])
            self._open[peer] = self._open.get(peer, 0) + 1
        self._request(peer, key, taken, deliver)

    def _request(self, peer: int, key: Key, taken: list[Key], deliver: Deliver) -> None:
        def done(future: Future[Any]) -> None:
            try:
                answer = future.value()
            except RuntimeError as error:
                self._failed(peer, key, taken, deliver, str(error))
            else:
                self._arrived(peer, key, deliver, answer)

        try:
            args = (self.worker, key, taken)
            future: Future[Any] = rpc.rpc_async(_name(peer), _answer, args=args, timeout=_LONG_POLL_S)
        except RuntimeError as error:
            deliver(_first_line(error))
            return
        future.add_done_callback(done)

    def _failed(self, peer: int, key: Key, taken: list[Key], deliver: Deliver, text: str) -> None:
        if self._closed:
            return
        if "timeout" in text.lower() or "timed out" in text.lower():
            self._request(peer, key, taken, deliver)
        else:
            deliver(_first_line(text))

    def _arrived(self, peer: int, key: Key, deliver: Deliver, answer: Any) -> None:
        with self._lock:
            self._open[peer] -= 1
            untold = self._untold.setdefault(peer, [])
            untold.append(key)
            alone = self._open[peer] == 0 or len(untold) >= _UNTOLD_LIMIT
            keys = self._untold.pop(peer) if alone else []
            # Counted before the delivery, after which this worker may be done and leave: see close().
            self._acks_due += alone
        deliver(Payload(*answer) if isinstance(answer, tuple) else answer)
        if alone:
            self._tell(peer, keys)

    def _tell(self, peer: int, keys: list[Key]) -> None:
        """Acknowledge without waiting; a peer that is gone needs no news."""

        def read(_: object) -> None:
            with self._lock:
                self._acks_due -= 1

        try:
            future: Future[Any] = rpc.rpc_async(_name(peer), _taken, args=(self.worker, keys), timeout=_LONG_POLL_S)
            future.add_done_callback(read)
        except RuntimeError:
            read(None)

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Of eight pings the fastest counts, as its asymmetry can be the least (Cristian 1989)."""
        best = (0, 2**62)
        for _ in range(8):
            sent = time.perf_counter_ns()
            there: int = rpc.rpc_sync(_name(peer), _clock, timeout=_LONG_POLL_S)
            error = (time.perf_counter_ns() - sent) // 2
            if error < best[1]:
                best = there - (sent + error), error
        return best

    def close(self) -> None:
        # Not graceful: that is a barrier over all workers, which hangs if one is gone (pytorch#63247).
        # Whoever calls this has made sure that nobody needs this worker any more.
        # Only its acknowledgements may still be under way, and the peers wait for them.
        self._closed = True
        deadline = time.monotonic() + _LEAVE_S
        while self._acks_due and time.monotonic() < deadline:
            time.sleep(0.005)
        rpc.shutdown(graceful=False)


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0]
