"""The road between a worker's device and its outbox, and the device's clock.

The wire carries CPU tensors. On a CPU there is no road. On CUDA a payload leaves through pinned buffers on a
side stream, and is published by a helper thread when the copy is complete; it enters through pinned buffers
on another side stream, for which the compute stream waits on the device. The compute thread never waits
for the device before the end of a step.
"""

from __future__ import annotations

import queue
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...dependency import ConfigError
from ..transport.payload import Payload, Tree, map_tensors

#: a point in time on the device; what it is depends on the courier
Mark = Any


class Courier(Protocol):
    """Moves payloads between device and outbox, batches to the device, and tells the device's time."""

    device: torch.device
    #: True if an action has been computed when its call returns
    in_step: bool

    def leave(self, payload: Payload, publish: Callable[[Payload], None]) -> None:
        """Call `publish` with the payload in CPU memory, when it is there; return at once."""

    def enter(self, payload: Payload) -> Payload:
        """Bring an arrived payload towards the device. Runs in the transport's thread."""

    def ready(self, payload: Payload) -> Payload:
        """Make the compute that follows wait for the payload, on the device. Runs in the compute thread."""

    def load(self, batch: Tree) -> Tree:
        """Bring a part of the user's batch to the device."""

    def mark(self) -> Mark:
        """Return the point in time that the compute issued so far ends."""

    def resolve(self, marks: list[Mark]) -> list[int]:
        """Return marks, in the order in which they were made, as `perf_counter_ns`; may wait for the device."""

    def peak_bytes(self) -> int:
        """Return the most memory held so far: by the process on a CPU, by torch on the device on a GPU."""


def courier_for(device: str) -> Courier:
    """Return the courier for `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: the device does not exist here.
    """
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N") from None
    if parsed.type == "cpu":
        return CpuCourier()
    if parsed.type != "cuda":
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (parsed.index or 0) >= count:
        raise ConfigError(f"device {device!r}: this machine has {count} CUDA devices; cpu always works")
    return CudaCourier(torch.device("cuda", parsed.index or 0))


class CpuCourier:
    """Compute and outbox share one memory."""

    in_step = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def leave(self, payload: Payload, publish: Callable[[Payload], None]) -> None:
        publish(payload)

    def enter(self, payload: Payload) -> Payload:
        return payload

    def ready(self, payload: Payload) -> Payload:
        return payload

    def load(self, batch: Tree) -> Tree:
        return batch

    def mark(self) -> Mark:
        return time.perf_counter_ns()

    def resolve(self, marks: list[Mark]) -> list[int]:
        return marks

    def peak_bytes(self) -> int:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux


class CudaCourier:
    """Pinned buffers and side streams; see asks R13 to R15 of TensorPipe's users (pytorch#100784, #44169)."""

    in_step = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._entered: dict[int, torch.cuda.Event] = {}
        self._leaving: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()
        threading.Thread(target=self._publish_when_copied, name="courier", daemon=True).start()

    def leave(self, payload: Payload, publish: Callable[[Payload], None]) -> None:
        computed = torch.cuda.current_stream(self.device).record_event()
        self._out.wait_event(computed)
        with torch.cuda.stream(self._out):
            copies = []
            for tensor in payload.tensors:
                # empty_like with pinned memory keeps the strides, so the consumer sees the same layout
                copies.append(torch.empty_like(tensor, device="cpu", pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._out)
            copied = self._out.record_event()
        self._leaving.put((copied, Payload(copies, payload.skeleton), publish))

    def _publish_when_copied(self) -> None:
        while True:
            copied, payload, publish = self._leaving.get()
            copied.synchronize()  # releases the GIL
            publish(payload)

    def enter(self, payload: Payload) -> Payload:
        with torch.cuda.device(self.device), torch.cuda.stream(self._in):
            moved = [self._upload(tensor) for tensor in payload.tensors]
            entered = Payload(moved, payload.skeleton)
            self._entered[id(entered)] = self._in.record_event()
        return entered

    def _upload(self, tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def ready(self, payload: Payload) -> Payload:
        event = self._entered.pop(id(payload), None)
        if event is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(event)
            for tensor in payload.tensors:
                tensor.record_stream(compute)
        return payload

    def load(self, batch: Tree) -> Tree:
        return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda else self._upload(tensor))

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def resolve(self, marks: list[Mark]) -> list[int]:
        if not marks:
            return []
        marks[-1].synchronize()
        times = [self._origin_ns + round(self._origin.elapsed_time(mark) * 1e6) for mark in marks]
        # The device tells a difference as a 32-bit float of ms, which is coarse after hours: measure from here next.
        self._origin, self._origin_ns = marks[-1], times[-1]
        return times

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)
