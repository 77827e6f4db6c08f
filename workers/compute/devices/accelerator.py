"""The road between an accelerator and its worker's outbox: pinned buffers and side streams."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ....dependency import PipeError
from ...transport.device_way import DeviceWay
from ...transport.form import Look, Moving, dense_of, shown, travels
from ...transport.payload import Laid, Payload, Staying, Tree, is_dense, map_tensors
from ..modules.torch_internals import open_device_memory, share_device_memory
from .device import DeviceBackend


class Accelerator:
    """The part of torch that a backend needs, alike for CUDA, XPU and devices that other packages bring.

    Tests substitute a device that delays all it may.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Autograd has a thread for each device. cuBLAS warns where it is the first in a thread to need the context.
        with torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), device=device, requires_grad=True).mul(1.0).backward()

    def use(self) -> None:
        """Let this thread compute on the device."""
        torch.accelerator.set_device_index(self.device)

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.Stream(self.device)

    def current(self) -> Any:
        """Return the stream that computes."""
        return torch.accelerator.current_stream(self.device)

    def follow(self, stream: Any) -> None:
        """Let this thread compute in `stream`, on its device."""
        torch.accelerator.set_stream(stream)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Return a context that issues work to `stream`."""
        # Not by `with stream`: a stream remembers one stream before it, and several threads use one.
        with torch.accelerator.device_index(self.device.index):
            before = self.current()
            self.follow(stream)
            try:
                yield
            finally:
                self.follow(before)

    def recorded(self, stream: Any) -> Any:
        """Return an event, with its time, behind the work that has been issued to `stream`."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device, not in the host's memory."""
        return tensor.device == self.device

    def down(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy that the current stream fills; for dense layouts on the device."""
        # empty_like with pinned memory keeps the strides, so the consumer sees the same layout
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.current())
        return copy

    def up(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device that the current stream fills."""
        # A tensor that repeats elements, such as a batch's mask, has no pinned copy with the same strides.
        pinnable = tensor.is_cpu and tensor.layout is torch.strided and is_dense(tensor) and not tensor.is_pinned()
        return (tensor.pin_memory() if pinnable else tensor).to(self.device, non_blocking=True)

    def copy(self, to: Tensor, source: Tensor) -> Tensor:
        """Have the current stream copy memory within or between devices; return `to`."""
        return to.copy_(source, non_blocking=True)

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of `tensor` until `stream` is done with all work issued so far."""
        tensor.record_stream(stream)

    def peak_bytes(self) -> int:
        """Return the most memory that was held."""
        return torch.accelerator.max_memory_allocated(self.device)


class Cuda(Accelerator):
    """CUDA also shares memory and events between processes, by streams and events of its package."""

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def identity(self) -> str:
        """Return the device's name, alike in all processes."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def share(self, memory: Tensor) -> Any:
        """Return a handle of memory, a plain value."""
        return share_device_memory(memory)

    def opened(self, identity: str, handle: Any) -> Tensor:
        """Return another process's memory, bytes of it; raise OSError if its device cannot be used here."""
        count = range(torch.cuda.device_count())
        indices = [each for each in count if str(torch.cuda.get_device_properties(each).uuid) == identity]
        if not indices:
            raise OSError("its device cannot be seen from this process")
        storage = open_device_memory(indices[0], handle)
        memory = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", indices[0]))
        return memory.set_(storage, 0, (storage.nbytes(),), (1,))

    def register(self, memory: Tensor) -> None:
        """Let the device copy from and to memory of the host by itself; raise OSError if it cannot."""
        if failed := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            with suppress(RuntimeError):  # the next launch raises the error, too
                torch.zeros(1, device=self.device)
            raise OSError(f"cudaHostRegister returns {failed}")

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        torch.cuda.cudart().cudaHostUnregister(address)

    def shared_event(self) -> Any:
        """Return an event that other processes can wait for."""
        event = torch.cuda.Event(interprocess=True)
        event.record(self.current())
        return event

    def share_event(self, event: Any) -> Any:
        """Return a handle of an event, a plain value."""
        return event.ipc_handle()

    def opened_event(self, handle: Any) -> Any:
        """Return another process's event."""
        return torch.cuda.Event.from_ipc_handle(self.device, handle)


class AcceleratorBackend(DeviceBackend):
    """Pinned buffers and side streams; see asks R13 to R15 of TensorPipe's users (pytorch#100784, #44169)."""

    in_step = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.device, self._accelerator = accelerator.device, accelerator
        self._out, self._in = accelerator.stream(), accelerator.stream()
        self._leaving: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._origin = accelerator.recorded(accelerator.current())
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()
        threading.Thread(target=self._publish_when_copied, name="backend", daemon=True).start()

    def use(self) -> None:
        self._accelerator.use()

    def as_here(self) -> Callable[[], None]:
        stream = self._accelerator.current()

        def follow() -> None:
            self._accelerator.use()
            self._accelerator.follow(stream)

        return follow

    def leave(
        self, payload: Payload, publish: Callable[[Payload], object], failed: Callable[[PipeError], None]
    ) -> None:
        self._leave(payload, self._accelerator.recorded(self._accelerator.current()), publish, failed)

    def staying(self, payload: Payload, failed: Callable[[PipeError], None]) -> Staying | None:
        if not all([self._accelerator.has(each) and travels(each) for each in payload.tensors]):
            return None  # a part is on the host
        event = self._accelerator.recorded(self._accelerator.current())

        def leave(publish: Callable[[Payload], object], lay: Callable[[], Laid | None] | None) -> None:
            if lay is None or (laid := lay()) is None:
                self._leave(payload, event, publish, failed)
            else:
                self._leaving.put((laid, payload, publish, failed))

        return Staying(payload.tensors, payload.skeleton, event, leave)

    def way(self) -> DeviceWay | None:
        accelerator = self._accelerator
        return DeviceWay(accelerator, self._out, self._in) if isinstance(accelerator, Cuda) else None

    def _leave(
        self, payload: Payload, event: Any, publish: Callable[[Payload], object], failed: Callable[[PipeError], None]
    ) -> None:
        self._out.wait_event(event)
        with self._accelerator.on(self._out):
            left = [self._left(tensor) for tensor in payload.tensors]
            looks = [look for _, look in left]
            moving = Moving([copy for copy, _ in left], payload.skeleton, looks, self._accelerator.recorded(self._out))
        # The tensors are held until they are copied: the caller may release them.
        self._leaving.put((moving, payload, publish, failed))

    def _left(self, tensor: Tensor) -> tuple[Tensor, Look | None]:
        """Copy a tensor to the host, densely; one that is there, such as a norm that is only passed on, is as it is."""
        if not (self._accelerator.has(tensor) and travels(tensor)):
            return tensor.cpu(), None  # of another device or layout it is waited for
        look, dense = dense_of(tensor)
        return self._accelerator.down(dense), look

    def _publish_when_copied(self) -> None:
        while (leaving := self._leaving.get()) is not None:
            moving, held, publish, failed = leaving
            try:
                moving.event.synchronize()  # releases the GIL
                publish(moving.unfold())
            except BaseException as error:
                failed(PipeError(f"{self.device}: a payload could not leave it: {type(error).__name__}: {error}"))
            del leaving, moving, held, publish, failed  # not to be held until the next one arrives

    def enter(self, payload: Payload) -> Payload:
        if isinstance(payload, Moving):
            return payload  # it is from another device
        if isinstance(payload, Staying):  # it is here: of a worker of this process, and nothing is copied
            return Moving(payload.tensors, payload.skeleton, [None] * len(payload.tensors), payload.event)
        with self._accelerator.on(self._in):
            entered = [self._entered(tensor) for tensor in payload.tensors]
            looks = [look for _, look in entered]
            return Moving([copy for copy, _ in entered], payload.skeleton, looks, self._accelerator.recorded(self._in))

    def _entered(self, tensor: Tensor) -> tuple[Tensor, Look | None]:
        """Copy a tensor to the device, densely; a conjugate one stays so, because products choose kernels by it."""
        if not travels(tensor):
            return self._accelerator.up(tensor), None
        look, dense = dense_of(tensor)
        return self._accelerator.up(dense), look

    def ready(self, payload: Payload) -> Payload:
        if isinstance(payload, Moving):
            compute = self._accelerator.current()
            compute.wait_event(payload.event)
            for tensor in payload.tensors:
                self._accelerator.hold(tensor, compute)
            return payload.unfold()
        return payload

    def load(self, batch: Tree) -> Tree:
        return map_tensors(batch, self._here)

    def _here(self, tensor: Tensor) -> Tensor:
        if self._accelerator.has(tensor):
            return tensor
        with self._accelerator.on(self._accelerator.current()):
            return shown(*self._entered(tensor))

    def timestamp(self) -> Any:
        return self._accelerator.recorded(self._accelerator.current())

    def resolve(self, timestamps: list[Any]) -> list[int]:
        if not timestamps:
            return []
        for timestamp in timestamps:  # a copy's timestamp is noted when the copy is done, which may be late
            timestamp.synchronize()
        times = [self._origin_ns + round(self._origin.elapsed_time(timestamp) * 1e6) for timestamp in timestamps]
        # The device gives a difference as a 32-bit float of ms, which is coarse after hours: measure from here next.
        self._origin_ns, self._origin = max(zip(times, timestamps, strict=True), key=lambda pair: pair[0])
        return times

    def peak_bytes(self) -> int:
        return self._accelerator.peak_bytes()

    def close(self) -> None:
        self._leaving.put(None)
