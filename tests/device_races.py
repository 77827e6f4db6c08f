"""A device on which each access to memory is compared with those before it on other streams.

An access races with another one if neither the device nor a host orders them. The test device shows a race by numbers
if a copy is late. This one shows it if compute is late, too: compute runs at once on the test device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fake_cuda import FakeCuda, Stream
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_here = threading.local()


class Races:
    """Finds races and waits of hosts, as texts."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def access(self, tensor: Tensor, stream: Stream, *, writes: bool, what: str) -> None:
        """Note an access behind all that has been issued to a stream."""
        if _is_on_host(tensor):
            return
        with Stream._lock:
            seen = tensor.untyped_storage().__dict__.setdefault("seen", {})
            for (other, wrote), (end, before) in list(seen.items()):
                if (writes or wrote) and stream.behind.get(other, 0) < end:
                    self.found.append(
                        f"{what} {'writes' if writes else 'reads'} {tuple(tensor.shape)} before {before} ends"
                    )
            seen[stream, writes] = stream.behind[stream], what

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Let waits of this thread within an action count."""
        before, _here.action = getattr(_here, "action", ""), name
        try:
            yield
        finally:
            _here.action = before

    def wait(self, what: str) -> None:
        """Note that a host waits."""
        if name := getattr(_here, "action", ""):
            self.found.append(f"{name} waits for the device: {what}")


class Watch(TorchDispatchMode):
    """Notes what the operators of a worker's thread read and write."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, cuda = func(*args, **(kwargs or {})), getattr(_here, "cuda", None)
        if cuda is None:
            return made
        schema = func._schema
        pairs = list(_given(schema, args, kwargs or {}))
        if all([_is_on_host(tensor) for tensor, _ in pairs]):  # those that are made of no tensor, too
            for tensor in _tensors(made):
                tensor.untyped_storage().on_host = True
            return made
        if schema.name == "aten::_local_scalar_dense":
            self._races.wait("a number is read")
        if not func.is_view:
            with Stream._lock:
                cuda.current().issue(_nothing)
                for tensor, writes in [*pairs, *((tensor, True) for tensor in _tensors(made))]:
                    self._races.access(tensor, cuda.current(), writes=writes, what=schema.name)
        return made


class WatchedCuda(FakeCuda):
    """The test device, all of whose accesses are noted."""

    def __init__(self, races: Races, compute: Stream | None = None) -> None:
        super().__init__()
        self._races = races
        self._compute = compute or self._compute

    def use(self) -> None:
        _here.cuda = self

    def _copied(self, tensor: Tensor) -> Tensor:
        return self._noted(super()._copied(tensor), tensor)

    def copy(self, to: Tensor, source: Tensor) -> Tensor:
        return self._noted(super().copy(to, source), source)

    def _noted(self, to: Tensor, source: Tensor) -> Tensor:
        self._races.access(source, self.current(), writes=False, what="a copy")
        to.untyped_storage().on_host = False
        self._races.access(to, self.current(), writes=True, what="a copy")
        return to


def _nothing() -> None:
    """Stand for work that is done."""


def _given(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """Return the tensors given to an operator, and whether it writes them."""
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if isinstance(value, (Tensor, list, tuple)):
            alias = argument.alias_info
            for tensor in _tensors(value):
                yield tensor, alias is not None and alias.is_write


def _tensors(value: Any) -> list[Tensor]:
    listed = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in listed if isinstance(each, Tensor) and each.layout is torch.strided]


def _is_on_host(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "on_host", False)
