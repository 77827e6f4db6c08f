"""The interface of a training that can be recorded; `Pipeline` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..dependency import Entry, Order, Spec
from ..workers.hooks import Listener

if TYPE_CHECKING:
    from ..workers.actor import WorkerActor


class Watchable(Protocol):
    """A training with workers to which listeners can be added."""

    spec: Spec

    @property
    def actors(self) -> list[WorkerActor]:
        """The workers of this process."""

    @property
    def order(self) -> Order:
        """The order in which workers run ready actions."""

    def program(self, worker: int, num_microbatches: int) -> list[Entry]:
        """Return the entries of `worker` in a training step of `num_microbatches` microbatches."""

    def shards(self, worker: int) -> Sequence[tuple[int, int, int]]:
        """Return (stage, route, number of layers) of every shard that `worker` holds."""

    def listen(self, listener: Callable[[int], Listener]) -> None:
        """Add `listener(worker)` to every worker of this process."""
