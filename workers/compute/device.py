"""The road between a worker's device and its outbox, and the device's clock.

Carriers take CPU tensors. On a CPU there is no road. On CUDA a payload leaves through pinned buffers on a
side stream, and is published by a helper thread when the copy is complete; it enters through pinned buffers
on another side stream, for which the compute stream waits on the device. The compute thread never waits
for the device before the end of a step.
"""

from __future__ import annotations

import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...dependency import ConfigError, PipeError
from ..transport.payload import Payload, Tree, map_tensors, parts_of
from ..transport.strides import fold, is_dense, is_sparing, spread

logger = logging.getLogger(__name__)

#: a point in time on the device; what it is depends on the backend
Timestamp = Any


class DeviceBackend(Protocol):
    """Moves payloads between device and outbox, batches to the device, and tells the device's time."""

    device: torch.device
    #: True if an action has been computed when its call returns
    in_step: bool

    def use(self) -> None:
        """Let this thread compute on the device, also where a model names none."""

    def as_here(self) -> Callable[[], None]:
        """Return what lets another thread compute where this one does: on the device, and in the same stream of it."""

    def leave(self, payload: Payload, publish: Callable[[Payload], None], failed: Callable[[PipeError], None]) -> None:
        """Call `publish` with the payload in CPU memory, when it is there, or `failed`; return at once."""

    def enter(self, payload: Payload) -> Payload:
        """Bring an arrived payload towards the device. Runs in the transport's thread."""

    def ready(self, payload: Payload) -> Payload:
        """Make the compute that follows wait for the payload, on the device. Runs in the compute thread."""

    def load(self, batch: Tree) -> Tree:
        """Bring a part of the user's batch, or what has arrived on the host, to the device."""

    def timestamp(self) -> Timestamp:
        """Return the point in time that the compute issued so far ends."""

    def resolve(self, timestamps: list[Timestamp]) -> list[int]:
        """Return timestamps as `perf_counter_ns`; may wait for the device."""

    def peak_bytes(self) -> int:
        """Return the most memory held so far: by the process on a CPU, by torch on the device on a GPU."""

    def close(self) -> None:
        """Let the last payloads leave, and nothing after them."""


def usual_device(num_workers: int, *, tells: bool) -> str:
    """Return `cuda` where this host has a GPU for each of its workers, else `cpu`.

    Args:
        num_workers: the workers of this host.
        tells: whether to say that GPUs are used, as one worker does.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < num_workers:
        return "cpu"
    if tells:
        logger.warning(
            "device: cuda, as this host has %d GPUs for its %d workers; device='cpu' or --device cpu uses none of them",
            count,
            num_workers,
        )
    return "cuda"


def backend_for(device: str, place: int = 0) -> DeviceBackend:
    """Return the backend for `cpu`, `cuda` or `cuda:N`.

    Args:
        place: of the worker among those of its host: `cuda` is the GPU of this number, where there are fewer from the
            first again.

    Raises:
        ConfigError: the device does not exist here.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N") from None
    if parsed.type == "cpu":
        return CpuBackend()
    if parsed.type != "cuda":
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (parsed.index or 0) >= count:
        raise ConfigError(f"device {device!r}: this machine has {count} CUDA devices; cpu always works")
    if parsed.index is None and place >= count:
        logger.warning(
            "device cuda: this host has %d GPUs, so worker %d of it shares cuda:%d", count, place, place % count
        )
    index = place % count if parsed.index is None else parsed.index
    return CudaBackend(Cuda(torch.device("cuda", index)))


class CpuBackend:
    """Compute and outbox share one memory."""

    in_step = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def use(self) -> None:
        pass

    def as_here(self) -> Callable[[], None]:
        return self.use

    def leave(self, payload: Payload, publish: Callable[[Payload], None], failed: Callable[[PipeError], None]) -> None:
        publish(payload)

    def enter(self, payload: Payload) -> Payload:
        return payload

    def ready(self, payload: Payload) -> Payload:
        return payload

    def load(self, batch: Tree) -> Tree:
        return batch

    def timestamp(self) -> Timestamp:
        return time.perf_counter_ns()

    def resolve(self, timestamps: list[Timestamp]) -> list[int]:
        return timestamps

    def peak_bytes(self) -> int:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux

    def close(self) -> None:
        pass


class Cuda:
    """The part of `torch.cuda` that a backend needs; a test has another, of which nothing is done before it must be."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use(self) -> None:
        """Let this thread compute on the device."""
        torch.cuda.set_device(self.device)

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """Return the stream that computes."""
        return torch.cuda.current_stream(self.device)

    def follow(self, stream: Any) -> None:
        """Let this thread compute in `stream`, on its device."""
        torch.cuda.set_stream(stream)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Let what is issued go to `stream`."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def recorded(self, stream: Any) -> Any:
        """Return an event, with its time, at the end of what has been issued to `stream`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is on the device, not in the host's memory."""
        return tensor.device == self.device

    def down(self, tensor: Tensor) -> Tensor:
        """Return a tensor in pinned memory to which the current stream copies; for dense layouts on the device."""
        # empty_like with pinned memory keeps the strides, so the consumer sees the same layout
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return copy

    def up(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device to which the current stream copies."""
        # Of what repeats elements, as masks of a batch do, no pinned copy with the same strides can be made.
        pinnable = tensor.is_cpu and tensor.layout is torch.strided and is_dense(tensor) and not tensor.is_pinned()
        return (tensor.pin_memory() if pinnable else tensor).to(self.device, non_blocking=True)

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of `tensor` until `stream` is done with what it has been issued."""
        for part in parts_of(tensor):  # of sparse tensors torch does not know how
            part.record_stream(stream)

    def peak_bytes(self) -> int:
        """Return the most memory that was held."""
        return torch.cuda.max_memory_allocated(self.device)


#: shape and strides of a tensor that is not dense
_Look = tuple[tuple[int, ...], tuple[int, ...]] | None


def _look(tensor: Tensor) -> _Look:
    if tensor.layout is not torch.strided or is_dense(tensor) or not is_sparing(tensor.shape, tensor.stride()):
        return None
    return tensor.shape, tensor.stride()


@dataclass(slots=True)
class _Moving(Payload):
    """A payload whose copies, dense ones, have been issued; what they look like there; `event`: when they are there."""

    looks: list[_Look]
    event: Any

    def spread(self) -> Payload:
        """Return the payload as it was."""
        return Payload([_spread(*each) for each in zip(self.tensors, self.looks, strict=True)], self.skeleton)


def _spread(copy: Tensor, look: _Look) -> Tensor:
    if look is None:
        return copy
    return spread(copy.conj(), *look).conj() if copy.is_conj() else spread(copy, *look)


class CudaBackend:
    """Pinned buffers and side streams; see asks R13 to R15 of TensorPipe's users (pytorch#100784, #44169)."""

    in_step = False

    def __init__(self, cuda: Cuda) -> None:
        self.device, self._cuda = cuda.device, cuda
        self._out, self._in = cuda.stream(), cuda.stream()
        self._leaving: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._origin = cuda.recorded(cuda.current())
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()
        threading.Thread(target=self._publish_when_copied, name="backend", daemon=True).start()

    def use(self) -> None:
        self._cuda.use()

    def as_here(self) -> Callable[[], None]:
        stream = self._cuda.current()

        def follow() -> None:
            self._cuda.use()
            self._cuda.follow(stream)

        return follow

    def leave(self, payload: Payload, publish: Callable[[Payload], None], failed: Callable[[PipeError], None]) -> None:
        self._out.wait_event(self._cuda.recorded(self._cuda.current()))
        with self._cuda.on(self._out):
            left = [self._left(tensor) for tensor in payload.tensors]
            looks = [look for _, look in left]
            moving = _Moving([copy for copy, _ in left], payload.skeleton, looks, self._cuda.recorded(self._out))
        # The tensors are held until they are copied: the caller may let go of them.
        self._leaving.put((moving, payload, publish, failed))

    def _left(self, tensor: Tensor) -> tuple[Tensor, _Look]:
        """Copy a tensor to the host, densely; one that is there, such as a norm that is only passed on, is as it is."""
        # Torch would make numbers conjugate, or negative, in the host's copy at once, before they are there.
        if tensor.is_conj():
            copy, look = self._left(tensor.conj())
            return copy.conj(), look
        tensor = tensor.resolve_neg()
        if self._cuda.has(tensor) and tensor.layout is torch.strided:
            look = _look(tensor)
            return self._cuda.down(fold(tensor) if look else tensor), look
        return tensor.cpu(), None  # of another device or layout it is waited for

    def _publish_when_copied(self) -> None:
        while (leaving := self._leaving.get()) is not None:
            moving, held, publish, failed = leaving
            try:
                moving.event.synchronize()  # releases the GIL
                publish(moving.spread())
            except BaseException as error:
                failed(PipeError(f"{self.device}: a payload could not leave it: {type(error).__name__}: {error}"))
            del leaving, moving, held, publish, failed  # not to be held until the next one comes

    def enter(self, payload: Payload) -> Payload:
        with self._cuda.on(self._in):
            looks = [None if tensor.is_conj() else _look(tensor) for tensor in payload.tensors]
            dense = [fold(tensor) if look else tensor for tensor, look in zip(payload.tensors, looks, strict=True)]
            return _Moving(list(map(self._cuda.up, dense)), payload.skeleton, looks, self._cuda.recorded(self._in))

    def ready(self, payload: Payload) -> Payload:
        if isinstance(payload, _Moving):
            compute = self._cuda.current()
            compute.wait_event(payload.event)
            for tensor in payload.tensors:
                self._cuda.hold(tensor, compute)
            return payload.spread()
        return payload

    def load(self, batch: Tree) -> Tree:
        with self._cuda.on(self._cuda.current()):
            return map_tensors(batch, lambda tensor: tensor if self._cuda.has(tensor) else self._cuda.up(tensor))

    def timestamp(self) -> Timestamp:
        return self._cuda.recorded(self._cuda.current())

    def resolve(self, timestamps: list[Timestamp]) -> list[int]:
        if not timestamps:
            return []
        for timestamp in timestamps:  # those of copies are noted when they are done, which may be late
            timestamp.synchronize()
        times = [self._origin_ns + round(self._origin.elapsed_time(timestamp) * 1e6) for timestamp in timestamps]
        # The device tells a difference as a 32-bit float of ms, which is coarse after hours: measure from here next.
        self._origin_ns, self._origin = max(zip(times, timestamps, strict=True), key=lambda pair: pair[0])
        return times

    def peak_bytes(self) -> int:
        return self._cuda.peak_bytes()

    def close(self) -> None:
        self._leaving.put(None)
