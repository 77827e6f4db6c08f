"""A training as those see it who record it: `Pipeline` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..dependency import Entry, Order, Spec
from ..workers.hooks import Listener

if TYPE_CHECKING:
    from ..workers.actor import WorkerActor


class Watchable(Protocol):
    """Workers that listeners can be added to."""

    spec: Spec

    @property
    def actors(self) -> list[WorkerActor]:
        """The workers of this process."""

    @property
    def order(self) -> Order:
        """In what order workers run what is ready."""

    def program(self, worker: int, num_microbatches: int) -> list[Entry]:
        """Return what `worker` runs in a training step of so many microbatches."""

    def shards(self, worker: int) -> Sequence[tuple[int, int, int]]:
        """Return (stage, route, number of layers) of every shard that `worker` holds."""

    def listen(self, listener: Callable[[int], Listener]) -> None:
        """Add `listener(worker)` to every worker of this process."""
