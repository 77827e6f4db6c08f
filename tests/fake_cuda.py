"""A device that does nothing before it must: what is copied on a side stream is copied when somebody waits for it.

Until then the copy holds no numbers, and what is copied is what its source holds *then*: a consumer that does not wait,
and a producer that writes too early, both come to other results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rpc_pipe.workers.compute.devices.accelerator import Cuda


class Stream:
    """Work in order; that of an eager one is done at once, as compute on a CPU is."""

    #: one for all, as streams of several devices wait for each other
    _lock = threading.RLock()

    #: how far hosts have waited for each stream
    awaited: ClassVar[MutableMapping[Stream, int]] = WeakKeyDictionary()
    #: returns how much of a late stream is done without a cause
    pace: Callable[[int], int] = staticmethod(lambda waiting: 0)

    def __init__(self, eager: bool = False) -> None:
        self._eager = eager
        self._waiting: list[Callable[[], None]] = []
        self._done = 0
        #: work issued now begins behind so much of each stream
        self.behind: dict[Stream, int] = {self: 0}

    def issue(self, work: Callable[[], None]) -> int:
        """Add work; return how much there is up to here."""
        with self._lock:
            self._waiting.append(work)
            end = self.behind[self] = self._done + len(self._waiting)
            self.begin_behind(self.awaited)
            self.run(end if self._eager else self._done + self.pace(len(self._waiting)))
            return end

    def begin_behind(self, ends: Mapping[Stream, int]) -> None:
        """Note that work issued from now on begins behind these ends."""
        with self._lock:
            for stream, end in list(ends.items()):
                if end > self.behind.get(stream, 0):
                    self.behind[stream] = end

    def run(self, end: int) -> None:
        with self._lock, _disable_current_modes():  # which see when work is issued, not when it is done
            while self._done < end:
                self._waiting.pop(0)()
                self._done += 1

    def wait_event(self, event: Event | SharedEvent) -> None:
        event = event.last
        self.begin_behind(event.ends)
        self.issue(event.reach)


class Event:
    """The end of what a stream had been given."""

    #: called when a host waits
    waits: Callable[[str], None] = staticmethod(lambda what: None)

    def __init__(self, stream: Stream) -> None:
        self._stream, self.time_ns = stream, 0
        with stream._lock:
            self._end = stream.issue(self._pass)
            self.ends = dict(stream.behind)

    @property
    def last(self) -> Event:
        return self

    def _pass(self) -> None:
        self.time_ns = time.perf_counter_ns()

    def reach(self) -> None:
        """Let the device do everything up to here."""
        self._stream.run(self._end)

    def synchronize(self) -> None:
        self.waits("an event is awaited")
        self.reach()
        self._tell_host()

    def query(self) -> bool:
        if self._stream._done < self._end:
            return False
        self._tell_host()
        return True

    def _tell_host(self) -> None:
        with self._stream._lock:
            for stream, end in self.ends.items():
                Stream.awaited[stream] = max(end, Stream.awaited.get(stream, 0))

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds; as torch does, refuse to tell the time of what has not been."""
        if not self.time_ns or not other.time_ns:
            raise RuntimeError("both events must be completed before calculating elapsed time")
        return (other.time_ns - self.time_ns) / 1e6


class SharedEvent:
    """An event that is recorded again and again; who waits for it waits for the last time before."""

    def record(self, stream: Stream) -> None:
        self.last = Event(stream)


class FakeCuda(Cuda):
    """Tensors "on the device" are tensors of the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._compute = Stream(eager=True)
        self._local = threading.local()
        self.num_copies = self.num_shared = 0

    def use(self) -> None:
        pass

    def stream(self) -> Any:
        return Stream()

    def current(self) -> Any:
        return getattr(self._local, "stream", self._compute)

    def follow(self, stream: Any) -> None:
        self._local.stream = stream

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

    def has(self, tensor: Tensor) -> bool:
        return True

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

    #: memory and events of all such devices, which are "other processes'" by their numbers
    handles: ClassVar[list[Any]] = []

    def identity(self) -> str:
        return "one for all"

    def share(self, memory: Any) -> Any:
        self.handles.append(memory)
        return len(self.handles) - 1

    def share_event(self, event: Any) -> Any:
        return self.share(event)

    def opened(self, identity: str, handle: int) -> Tensor:
        self.num_shared += 1
        memory: Tensor = self.handles[handle]
        return memory

    def opened_event(self, handle: int) -> Any:
        return self.handles[handle]

    #: addresses that devices reach, as often as they have been registered
    registered: ClassVar[list[int]] = []

    def register(self, memory: Tensor) -> None:
        self.registered.append(memory.data_ptr())

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def shared_event(self) -> Any:
        event = SharedEvent()
        event.record(self.current())
        return event

    def copy(self, to: Tensor, source: Tensor) -> Tensor:
        self.current().issue(lambda: to.copy_(source))
        self.num_copies += 1
        return to

    def peak_bytes(self) -> int:
        return 0


#: the device's other name, by which operators tell it from the host where they are told one
DEVICE = torch.device("cpu", 0)
_COPIES = ("copy_", "_foreach_copy_", "_to_copy", "set_")
_TAKE_HOSTS_NUMBERS = ("index", "index_put", "index_put_", "_unsafe_index")
_TAKE_NO_HOSTS_SCALARS = ("stack", "cat")


def is_there(tensor: Tensor) -> bool:
    """Tell whether a tensor counts as on the device."""
    return tensor.layout is torch.strided and getattr(tensor.untyped_storage(), "there", False)


def put_there(tensor: Tensor, there: bool = True) -> Tensor:
    """Let a tensor's memory count as on the device, or on the host."""
    tensor.untyped_storage().there = there  # type: ignore[attr-defined]
    return tensor


class Apart(TorchDispatchMode):
    """Lets an operator take tensors of the host or of the device, as on a GPU, and what it makes be where they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.layout is torch.strided}
        there, name = any(map(is_there, given)), func._schema.name.removeprefix("aten::")
        if there and name not in _COPIES + _TAKE_HOSTS_NUMBERS:
            for tensor in given:
                if not is_there(tensor) and (tensor.dim() or name in _TAKE_NO_HOSTS_SCALARS):
                    raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {tensor.shape}")
        device = kwargs.get("device")
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor not in given:
                put_there(tensor, there if device is None else device == DEVICE)
        return made


class StrictCuda(FakeCuda):
    """The same, where the host's tensors and the device's are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.device = DEVICE

    def has(self, tensor: Tensor) -> bool:
        return is_there(tensor)

    def down(self, tensor: Tensor) -> Tensor:
        assert is_there(tensor), "record_stream of a tensor of the host raises"
        return put_there(super().down(tensor), False)

    def up(self, tensor: Tensor) -> Tensor:
        assert not is_there(tensor), "a tensor of a device cannot be pinned"
        return put_there(super().up(tensor))

    def hold(self, tensor: Tensor, stream: Any) -> None:
        assert is_there(tensor), "record_stream of a tensor of the host raises"
