"""Workers as processes over `torch.distributed.rpc` (TensorPipe). The only file that imports it.

A message travels as a call, or as the reply to a call that lies here: so where payloads go both ways, as forwards and
backwards do, each costs one message of TensorPipe and not two.

    worker 0                                     worker 1
       call: 1 wants 0F0 0F1 .. ──────────────────  (lies at 0: the lifeline)
       call: 0F5, asks ───────────────────────────> lies at 1
       <─────────────────── reply to it: 1B4, took 0F5

Once two workers talk, one call of each always lies at the other: if the peer dies, the call breaks and shows it. No
call has a timeout: TCP delivers or breaks, and a large payload on a slow link may take long. The mailbox notices if
nothing at all arrives.

Handing a message to TensorPipe takes 100 to 300 us, waking another thread 30 us and then some 100 us of latency.

Options by measurement on one host, torch 2.13 (round trip of 256 KiB; CPU of an idle agent):
the default shm transport 396 us but 1.0 core of busy polling per process; uv 604 us and no idle CPU. With as
many workers as cores the first starves the compute, so: `uv`, and the `basic` channel (cma needs ptrace
rights that containers lack and aborts without them, pytorch#54266).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_rpc import _invoke_rpc_python_udf
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc.api import _default_pickler
from torch.distributed.rpc.internal import PythonUDF
from torch.futures import Future

from ...dependency import Malformed, NotMet
from .message import NOTHING, LinkCallbacks, Message, decode, encode
from .wakeup import Wakeup, within

#: handlers do not block, so few are enough for any number of workers
_RPC_THREADS = 2
_NO_TIMEOUT = 0.0
#: most calls of a peer that lie here without a reply
_MOST_HELD = 32
#: of torch's levels of logging
_ERROR = 2
#: names a store that is there already
_SCHEME = "rpc-pipe"
#: from here on torch adds where in the interpreter an error of another worker was raised
_STACK = "\n\nAt:"

_link: RpcLink | None = None
_kept = threading.local()


def _name(worker: int) -> str:
    return f"worker{worker}"


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _hear(peer: int, *said: Any) -> Future[Any]:
    """Runs at the receiver of a call, in an RPC thread: a future of the reply."""
    assert _link is not None
    _keep_thread_state()
    reply: Future[Any] = Future()
    _link.hear(peer, said, reply)
    return reply


class RpcLink:
    """Joins the group of workers and sends messages over RPC. One for the life of a process.

    Args:
        worker: the number of this process among the joining ones.
        workers: the numbers of all that join.
        place: where they meet, for an error.
        join_timeout_s: how long to wait for the other workers.
        store: torch's store for the meeting.
    """

    sends_cheaply = False
    look: Callable[[], None] | None = None
    #: connections that were refused: none are
    refused = 0

    def __init__(
        self, worker: int, workers: Iterable[int], place: str, join_timeout_s: float = 120.0, *, store: Any
    ) -> None:
        self.wakeup = Wakeup()
        self._worker, self._workers = worker, sorted(workers)
        self._place, self._timeout_s, self._store = place, join_timeout_s, store
        self._lock = threading.Lock()
        #: by peer: its calls that lie here, and how many of this worker's lie there
        self._held: dict[int, deque[Future[Any]]] = {peer: deque() for peer in self._workers}
        self._lying = dict.fromkeys(self._workers, 0)

    def open(self, ears: LinkCallbacks) -> None:
        global _link
        self._ears, _link = ears, self
        _silence_leaving()
        rank, count = self._workers.index(self._worker), len(self._workers)
        rendezvous = [(self._store, rank, count)]
        register_rendezvous_handler(_SCHEME, lambda *_, **__: iter(rendezvous))
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_RPC_THREADS, rpc_timeout=self._timeout_s, init_method=f"{_SCHEME}://",
            _transports=["uv"], _channels=["basic"],
        )  # fmt: skip
        try:
            with warnings.catch_warnings():
                # init_rpc itself uses a gloo group in a way that torch deprecates
                warnings.filterwarnings("ignore", message="You are using a Backend")
                # torch waits half an hour, regardless of `options`
                meet = partial(rpc.init_rpc, _name(self._worker), rank=rank, world_size=count)
                within(self._timeout_s, partial(meet, rpc_backend_options=options))
        except (RuntimeError, ValueError, TimeoutError) as error:
            many = f"the other {count - 1} workers at {self._place} within {timedelta(seconds=self._timeout_s)}"
            raise NotMet(f"worker {self._worker} could not meet {many}: {str(error).partition(_STACK)[0]}") from error

    def send(self, peer: int, message: Message) -> None:
        data, tensors = encode(message)
        said = data, [compact(tensor) for tensor in tensors]
        with self._lock:
            # The last one stays, as the peer's lifeline; and so does one of ours at the peer.
            held = self._held[peer].popleft() if len(self._held[peer]) > 1 and self._lying[peer] else None
            self._lying[peer] += held is None
        if held is not None:
            held.set_result(said)
            return
        try:
            future = _invoke(_name(peer), self._worker, *said)
        except RuntimeError as error:
            self._ears.on_lost(peer, str(error))
        else:
            future.add_done_callback(partial(self._replied, peer))

    def hear(self, peer: int, said: tuple[bytes, list[Tensor]], reply: Future[Any]) -> None:
        """Take a message of `peer` in; keep its call for one reply."""
        with self._ears.guard:
            with self._lock:
                self._held[peer].append(reply)
                too_many = self._held[peer].popleft() if len(self._held[peer]) > _MOST_HELD else None
            if too_many is not None:
                too_many.set_result(None)
            self._take_in(peer, *said)
            if not self._lying[peer]:
                self.send(peer, NOTHING)

    def _replied(self, peer: int, future: Future[Any]) -> None:
        _keep_thread_state()
        with self._ears.guard:
            with self._lock:
                self._lying[peer] -= 1
            try:
                said = future.value()
            except RuntimeError as error:
                self._ears.on_lost(peer, str(error))
                return
            if said is not None:
                self._take_in(peer, *said)

    def _take_in(self, peer: int, data: bytes, tensors: list[Tensor]) -> None:
        beside = iter(tensors)
        message = decode(data, lambda _: next(beside))
        if next(beside, None) is not None:
            raise Malformed("malformed message: more tensors than it says are beside it")
        self._ears.on_message(peer, message)

    def wait(self, timeout_s: float) -> bool:
        return self.wakeup.wait(timeout_s)

    def close(self) -> None:
        # Calls that lie here break: so peers notice, also if the answer to their goodbye is lost on its way. A graceful
        # shutdown is a barrier over all workers, which hangs if one is gone (pytorch#63247).
        rpc.shutdown(graceful=False)


# --- shorter ways than torch's public ones


def _silence_leaving() -> None:
    """Have TensorPipe not warn of every worker that leaves before another, unless the user has chosen a log level.

    torch reads `TORCH_CPP_LOG_LEVEL` when it is imported, which under torchrun and plain python is before us.
    """
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":
        with suppress(OSError, ValueError):  # another torch, which keeps its level elsewhere
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _ERROR


def _keep_thread_state() -> None:
    """Keep this RPC thread's Python state, which is else made and destroyed with every message (40 us each)."""
    if not getattr(_kept, "done", False):
        _kept.done = True
        with suppress(AttributeError):  # an interpreter other than CPython
            ctypes.pythonapi.PyGILState_Ensure()


def compact(tensor: Tensor) -> Tensor:
    """Copy a tensor that is a view of a larger storage, because RPC carries whole storages."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()  # keeps the strides of dense tensors, so kernels choose the same path after it


def _invoke(to: str, *args: Any) -> Future[Any]:
    """Call `_hear` at a worker: `rpc_async` without its work for profilers, other functions and inner tensors (15 %).

    Args:
        args: the last one is the tensors.
    """
    call = PythonUDF(_hear, args, {})
    # With tensors beside it the pickle must be torch's, which refers to them by number.
    pickled, tensors = (
        _default_pickler.serialize(call) if args[-1] else (pickle.dumps(call, pickle.HIGHEST_PROTOCOL), [])
    )
    future: Future[Any] = _invoke_rpc_python_udf(rpc.get_worker_info(to), pickled, tensors, _NO_TIMEOUT, True)
    return future
