"""A device that does nothing before it must: what is copied on a side stream is copied when somebody waits for it.

Until then the copy holds no numbers, and what is copied is what its source holds *then*: a consumer that does not wait,
and a producer that writes too early, both come to other results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rpc_pipe.workers.compute.device import Cuda


class Stream:
    """Work in order; that of an eager one is done at once, as compute on a CPU is."""

    def __init__(self, eager: bool = False) -> None:
        self._eager = eager
        self._waiting: list[Callable[[], None]] = []
        self._done = 0
        self._lock = threading.RLock()

    def issue(self, work: Callable[[], None]) -> int:
        """Add work; return how much there is up to here."""
        with self._lock:
            self._waiting.append(work)
            end = self._done + len(self._waiting)
            if self._eager:
                self.run(end)
            return end

    def run(self, end: int) -> None:
        with self._lock:
            while self._done < end:
                self._waiting.pop(0)()
                self._done += 1

    def wait_event(self, event: Event) -> None:
        self.issue(event.synchronize)


class Event:
    """The end of what a stream had been given."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.time_ns = stream, 0
        self._end = stream.issue(self._pass)

    def _pass(self) -> None:
        self.time_ns = time.perf_counter_ns()

    def synchronize(self) -> None:
        self._stream.run(self._end)

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds; as torch does, refuse to tell the time of what has not been."""
        if not self.time_ns or not other.time_ns:
            raise RuntimeError("both events must be completed before calculating elapsed time")
        return (other.time_ns - self.time_ns) / 1e6


class FakeCuda(Cuda):
    """Tensors "on the device" are tensors of the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._compute = Stream(eager=True)
        self._local = threading.local()
        self.num_copies = 0

    def use(self) -> None:
        pass

    def stream(self) -> Any:
        return Stream()

    def current(self) -> Any:
        return getattr(self._local, "stream", self._compute)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def recorded(self, stream: Any) -> Any:
        return Event(stream)

    def down(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor)

    def up(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor)

    def _copied(self, tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor)
        plain = copy.dim() and copy.is_contiguous() and copy.stride(-1) == 1
        copy.view(torch.uint8).fill_(0xFF) if plain else copy.zero_()
        self.current().issue(lambda: copy.copy_(tensor))
        self.num_copies += 1
        return copy

    def hold(self, tensor: Tensor, stream: Any) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0
