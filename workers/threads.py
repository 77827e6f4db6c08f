"""The workers of one process: each computes on a thread of its own, with the caller's settings, and after an error of
the user's they go on from the last complete step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from typing import TypeVar

import torch

from ..dependency import PeerLost, PipeError
from .actor import WorkerActor
from .transport.local import local_carriers

T = TypeVar("T")
logger = logging.getLogger(__name__)


class WorkerThreads:
    """Calls workers that are all the workers there are; one that is alone computes on the caller's thread."""

    def __init__(self, actors: Sequence[WorkerActor]) -> None:
        self._actors = actors
        self._pool = ThreadPoolExecutor(len(actors), "worker") if len(actors) > 1 else None

    def each(self, call: Callable[[WorkerActor], T]) -> list[T]:
        """Return `call(worker)` for every worker. If one fails, raise the first cause and undo what was under way."""
        try:
            return [call(self._actors[0])] if self._pool is None else self._together(self._pool, call)
        except BaseException:
            self._undo()
            raise

    def _together(self, pool: ThreadPoolExecutor, call: Callable[[WorkerActor], T]) -> list[T]:
        settings = callers_settings()

        def run(actor: WorkerActor) -> T:
            with settings():
                return call(actor)

        futures = [pool.submit(copy_context().run, run, actor) for actor in self._actors]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: let nobody wait for the others any more
            for actor in self._actors:
                actor.carrier.fault(PipeError("interrupted"))
            wait(futures)
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
            raise error
        return [future.result() for future in futures]

    def _undo(self) -> None:
        """Let all workers go on from the last step that every stage has completed."""
        shards = [shard for actor in self._actors for shard in actor.shards.values()]
        done = min(shard.num_updates for shard in shards)
        ahead = [shard.stage for shard in shards if shard.num_updates > done]
        if ahead:
            logger.warning(
                "step %d failed when stages %s had been updated already: they are one step ahead", done, ahead
            )
        for actor, carrier in zip(self._actors, local_carriers(len(self._actors)), strict=True):
            actor.resume(carrier, done)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def callers_settings() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which another thread computes as the calling one does now.

    Torch keeps these settings by thread. The number of threads decides how a sum is divided, and so its last bits.
    """
    num_threads, grad, inference = torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    cached, device = torch.is_autocast_cache_enabled(), torch.get_default_device()

    @contextmanager
    def settings() -> Iterator[None]:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            if device.type != "cpu":
                stack.enter_context(device)
            yield

    return settings
