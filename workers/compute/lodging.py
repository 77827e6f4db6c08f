"""Weights of a stage on a worker that has several of its replicas: one replica updates them, the rest are its guests.

Each replica has separate gradients and buffers, as it sees different rows. The modules have one replica's set at a
time, and the host's set between two actions. So a guest costs the memory of its gradients and buffers, and no second
copy of weights or optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from .modules.module_state import Place
from .stash import GradientSets


class HasParameters(Protocol):
    """A replica of a stage."""

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once."""


Replica = TypeVar("Replica", bound=HasParameters)


class Lodging(Generic[Replica]):
    """The replicas of a stage that share weights.

    Args:
        host: the replica that has the optimizer.
    """

    def __init__(self, host: Replica) -> None:
        self.host = host
        self._gradients = GradientSets(host)
        #: places of the buffers that differ between replicas; the buffers of the replicas that are not in place
        self._places: Sequence[Place] = ()
        self._buffers: dict[Replica, Sequence[Tensor | None]] = {}

    def part(self, places: Sequence[Place], buffers: dict[Replica, Sequence[Tensor | None]]) -> None:
        """Let the guests have separate buffers at some places."""
        self._places, self._buffers = places, buffers

    def turn(self, shard: Replica) -> Replica:
        """Put a replica's gradients and buffers into the modules; return the replica that had them in place before."""
        before = self._gradients.turn(shard, shard.parameters())
        if before is not shard and self._places:
            self._buffers[before] = [module._buffers[name] for module, name in self._places]
            for (module, name), buffer in zip(self._places, self._buffers.pop(shard), strict=True):
                module._buffers[name] = buffer
        return before

    @contextmanager
    def turned(self, shard: Replica) -> Iterator[None]:
        """Return a context with a replica's gradients and buffers in the modules."""
        before = self.turn(shard)
        try:
            yield
        finally:
            self.turn(before)

    def forget(self) -> None:
        """Put the host's set into the modules."""
        self.turn(self.host)
