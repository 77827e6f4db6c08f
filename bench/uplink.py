"""An emulated network: what a worker gives other replicas leaves it one payload after the other, at a given rate."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.futures import Future

from rpc_pipe.workers.mailbox import Mailbox


class Uplink:
    """Sends at so many bytes a second, in a thread of its own, as a network card would."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._queue = SimpleQueue[tuple[float, float, Callable[[], object]]]()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, num_bytes: float, then: Callable[[], object]) -> None:
        """Call `then` when that many bytes have left, behind all that were to be sent before."""
        self._queue.put((num_bytes, time.perf_counter(), then))

    def wait_for(self, num_bytes: float) -> None:
        """Return when that many bytes have left."""
        sent = threading.Event()
        self.send(num_bytes, sent.set)
        sent.wait()

    def _run(self) -> None:
        free = 0.0
        while True:
            num_bytes, begin, then = self._queue.get()
            free = max(free, begin) + num_bytes / self._bytes_per_s
            time.sleep(max(0.0, free - time.perf_counter()))
            then()

    def carry_ours(self) -> None:
        """Take what rpc-pipe's replicas exchange in this process."""
        publish = Mailbox.publish

        def published(mailbox: Mailbox, run: int, what: str, payload: Any, others: Any, **more: Any) -> None:
            if re.fullmatch(r"\d+[GSP]\d+", what):  # gradients, sums, parameters
                mailbox.carrier.outbox.promise((run, what), others)
                size = payload.num_bytes * len(others)
                self.send(size, lambda: mailbox.carrier.outbox.offer((run, what), payload, others))
            else:
                publish(mailbox, run, what, payload, others, **more)

        Mailbox.publish = published  # type: ignore[assignment, method-assign]

    def average(self, group: dist.ProcessGroup, bucket: Any) -> Future[Tensor]:
        """Average a bucket as `DistributedDataParallel` does by itself: a communication hook for it."""
        gradients, found, size = bucket.buffer(), Future[Tensor](), group.size()

        def reduce() -> None:
            dist.all_reduce(gradients.div_(size), group=group)
            found.set_result(gradients)

        self.send(2 * (size - 1) / size * gradients.nbytes, reduce)  # as a ring does
        return found

    def gather(self) -> AllGather:
        """Return how FSDP2 gathers parameters over this uplink."""
        return _Gather(self)

    def scatter(self) -> ReduceScatter:
        """Return how FSDP2 reduces gradients over this uplink."""
        return _Scatter(self)


class _Allocating:
    def __init__(self, uplink: Uplink) -> None:
        self._uplink = uplink

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocating, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self._uplink.wait_for((group.size() - 1) * input_tensor.nbytes)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its later name
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Allocating, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self._uplink.wait_for((group.size() - 1) * output_tensor.nbytes)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
