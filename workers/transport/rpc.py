"""Workers as processes over `torch.distributed.rpc` (TensorPipe). The only file that imports it.

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
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from ...dependency import NotMet
from .deadline import within
from .payload import compact
from .remote import RemoteCarrier

#: handlers do not block, so few are enough for any number of workers
_RPC_THREADS = 2
_NO_TIMEOUT = 0.0
_PING_S = 30.0
#: a worker that needs longer to answer, when nothing has come for long already, is silent
_ANSWER_S = 5.0
#: of torch's levels of logging
_ERROR = 2
#: names a store that is there already
_SCHEME = "rpc-pipe"
#: from here on torch adds where in the interpreter an error of another worker was raised
_STACK = "\n\nAt:"

_endpoint: RpcCarrier | None = None
_kept = threading.local()


def _name(worker: int) -> str:
    return f"worker{worker}"


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _handle(what: str, peer: int, *args: Any) -> Future[Any]:
    """Runs at the receiver of a request, in an RPC thread: a future of the reply."""
    assert _endpoint is not None
    _keep_thread_state()
    future: Future[Any] = Future()
    with _endpoint.answering_for_errors:
        _endpoint.handle(what, peer, future.set_result, *args)
    return future


def _clock() -> int:
    return time.perf_counter_ns()


def _look(seen: int) -> bytes:
    """Runs at a worker that is watched from another machine."""
    return b"" if _endpoint is None or _endpoint.serve_board is None else _endpoint.serve_board(seen)


class RpcCarrier(RemoteCarrier):
    """Joins the group of workers and carries pulls over RPC. One for the life of a process.

    Args:
        worker: this process's rank.
        num_workers: how many join; the call returns when all have.
        init_method: where they meet: `file:///path`, `tcp://host:port` or `env://`.
        join_timeout_s: for how long to wait for the others.
        store: where they meet instead, if there is one.
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
        store: Any = None,
        shared_memory: bool = True,
    ) -> None:
        global _endpoint
        super().__init__(worker, num_workers, shared_memory=shared_memory)
        #: what is shown to those who watch from other machines; see rpc_pipe/tracing/mirror.py
        self.serve_board: Callable[[int], bytes] | None = None
        _endpoint = self
        _silence_leaving()
        if store is not None:
            register_rendezvous_handler(_SCHEME, lambda *_, **__: iter([(store, worker, num_workers)]))
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_RPC_THREADS,
            rpc_timeout=join_timeout_s,
            init_method=init_method if store is None else f"{_SCHEME}://",
            _transports=["uv"],
            _channels=["basic"],
        )
        try:
            with warnings.catch_warnings():
                # init_rpc itself uses a gloo group in a way that torch deprecates
                warnings.filterwarnings("ignore", message="You are using a Backend")
                # torch waits half an hour, whatever `options` say
                meet = partial(rpc.init_rpc, _name(worker), rank=worker, world_size=num_workers)
                within(join_timeout_s, partial(meet, rpc_backend_options=options))
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise NotMet(
                f"worker {worker} could not meet the other {num_workers - 1} workers at {init_method} "
                f"within {timedelta(seconds=join_timeout_s)}: {str(error).partition(_STACK)[0]}"
            ) from error
        self._sender.start()

    def _request(self, peer: int, what: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        def replied(future: Future[Any]) -> None:
            _keep_thread_state()
            with self.answering_for_errors:
                try:
                    value = future.value()
                except RuntimeError as error:
                    self._failed(peer, str(error))
                else:
                    then(value)

        args = tuple([list(map(compact, arg)) if isinstance(arg, list) else arg for arg in args])
        try:
            # No timeout: it breaks if the peer does, and an exchange lies there until there is something to say.
            future = _invoke(_name(peer), _handle, (what, self.worker, *args), _NO_TIMEOUT)
        except RuntimeError as error:
            self._failed(peer, str(error))
        else:
            future.add_done_callback(replied)

    def _clock_of(self, peer: int) -> int:
        now: int = rpc.rpc_sync(_name(peer), _clock, timeout=_PING_S)
        return now

    def silent(self) -> list[int]:
        asked = {
            peer: rpc.rpc_async(_name(peer), _clock, timeout=_ANSWER_S)
            for peer in range(self.num_workers)
            if peer != self.worker
        }
        return [peer for peer, answer in asked.items() if not _answered(answer)]

    def look(self, peer: int, seen: int) -> futures.Future[bytes]:
        """Ask for what `peer` exhibits."""
        answer: futures.Future[bytes] = futures.Future()

        def came(found: Future[bytes]) -> None:
            try:
                answer.set_result(found.value())
            except RuntimeError as error:
                answer.set_exception(error)

        rpc.rpc_async(_name(peer), _look, args=(seen,), timeout=_PING_S).add_done_callback(came)
        return answer

    def close(self) -> None:
        super().close()
        # Gracefully is a barrier over all workers, which hangs if one is gone (pytorch#63247).
        rpc.shutdown(graceful=False)


def _answered(answer: Future[int]) -> bool:
    try:
        answer.wait()
    except RuntimeError:
        return False
    return True


# --- shorter ways than torch's public ones, where they are open


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


def _invoke_publicly(to: str, handler: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
    future: Future[Any] = rpc.rpc_async(to, handler, args=args, timeout=timeout_s)
    return future


def _quick_invoke() -> Callable[[str, Callable[..., Any], tuple[Any, ...], float], Future[Any]]:
    """Return `rpc_async` less what it does for other kinds of functions, profilers and tensors inside (15 %).

    That takes functions of torch that are not public. Where they are not what they were, `rpc_async` does it.
    """
    try:
        from torch._C._distributed_rpc import _invoke_rpc_python_udf
        from torch.distributed.rpc.api import _default_pickler
        from torch.distributed.rpc.internal import PythonUDF
    except ImportError:
        return _invoke_publicly
    infos: dict[str, Any] = {}

    def invoke(to: str, handler: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        global _invoke
        info = infos.get(to)
        if info is None:
            info = infos[to] = rpc.get_worker_info(to)
        try:
            call = PythonUDF(handler, args, {})
            # With tensors beside it the pickle must be torch's, which refers to them by number.
            if any(isinstance(arg, list) and arg for arg in args):
                pickled, tensors = _default_pickler.serialize(call)
            else:
                pickled, tensors = pickle.dumps(call, pickle.HIGHEST_PROTOCOL), []
            future: Future[Any] = _invoke_rpc_python_udf(info, pickled, tensors, timeout_s, True)
            return future
        except (TypeError, AttributeError):
            _invoke = _invoke_publicly
            return _invoke(to, handler, args, timeout_s)

    return invoke


_invoke = _quick_invoke()
