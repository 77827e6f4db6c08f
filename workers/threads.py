"""The workers of one process, if these are all there are: after an error of the user's code they continue from the last
complete step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ..dependency import PipeError
from ..system.allocator import keep_freed_memory
from .actor import WorkerActor
from .transport.local import local_carriers

if TYPE_CHECKING:
    from .thread_pool import ThreadPool

T = TypeVar("T")
logger = logging.getLogger(__name__)


class WorkerThreads:
    """Calls workers that are all the workers there are; one that is alone computes on the caller's thread."""

    def __init__(self, actors: Sequence[WorkerActor]) -> None:
        self._actors = actors
        for actor in actors:
            actor.recovers = True
        if actors[0].backend.in_step:
            keep_freed_memory()  # ahead of the threads, which would have separate heaps
        self._pool: ThreadPool | None = None
        if len(actors) > 1:
            from .thread_pool import ThreadPool

            self._pool = ThreadPool(actors)

    @property
    def alone(self) -> bool:
        """Whether there is one worker, which computes on the caller's thread."""
        return self._pool is None

    @property
    def stuck(self) -> bool:
        """Whether a worker has hung: no further calls can be made."""
        return self._pool is not None and self._pool.stuck

    def each(self, call: Callable[[WorkerActor], T]) -> list[T]:
        """Return `call(worker)` for every worker; raise the first cause if one fails."""
        return [call(self._actors[0])] if self._pool is None else self._pool.each(call)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Return a context that undoes begun steps after an error."""
        if self.stuck:
            raise PipeError("worker: one of this pipeline has hung; make another pipeline")
        try:
            yield
        except BaseException:
            if not self.stuck:
                self._undo()
            raise

    def _undo(self) -> None:
        """Let all workers continue from the last step that every stage has completed."""
        shards = [shard for actor in self._actors for shard in actor.shards.values()]
        # A schedule that is not synchronous may update several times a step, and continues from its last update.
        several = any(shard.versions is not None for shard in shards)
        done = min((s.num_updates for s in shards), default=0) if not several else min(a.step for a in self._actors)
        ahead = [] if several else [shard.stage for shard in shards if shard.num_updates > done]
        if ahead:
            logger.warning("step %d failed behind updates of stages %s, which are one step ahead", done + 1, ahead)
        for actor, carrier in zip(self._actors, local_carriers(len(self._actors)), strict=True):
            actor.resume(carrier, done)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()
