"""Threads for the workers of one process: each computes on a separate thread, with the caller's settings."""

import gc
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ..dependency import PeerLost, PipeError, Stalled
from .actor import WorkerActor
from .compute.modules.autocast import casting, enabled
from .compute.modules.torch_internals import keep_device_guard

T = TypeVar("T")
#: how long a worker may continue with an action when another has waited for too long
_PATIENCE_S = 2.0
#: seconds between two checks that workers make progress
_LOOK_S = 0.5
_HERE = Path(__file__).parent
logger = logging.getLogger(__name__)


class ThreadPool:
    """One thread for each worker of this process.

    Attributes:
        stuck: whether a worker has hung: no further calls can be made.
    """

    def __init__(self, actors: Sequence[WorkerActor]) -> None:
        keep_device_guard()  # ahead of the threads, which may compile and end
        self._actors, self.stuck = actors, False
        self._threads = [_Thread(actor.worker) for actor in actors]
        # A pipeline that is collected without a close must end its threads.
        self._ended = weakref.finalize(self, _end, self._threads)

    def each(self, call: Callable[[WorkerActor], T]) -> list[T]:
        """Return `call(worker)` for every worker; raise the first cause if one fails."""
        if threading.current_thread() in self._threads:
            raise PipeError("pipeline: called from within a worker: layers, losses and hooks cannot call it")
        settings = callers_settings()

        def run(actor: WorkerActor, follow: Callable[[], None]) -> T:
            follow()  # the caller's tensors on the device are ready in the caller's stream alone
            with settings():
                return call(actor)

        futures = [
            thread.submit(partial(copy_context().run, run, actor, actor.backend.as_here()))
            for thread, actor in zip(self._threads, self._actors, strict=True)
        ]
        try:
            self._await(futures)
        except Stalled:
            raise
        except BaseException:  # Ctrl-C: end all waits for other workers
            for actor in self._actors:
                actor.carrier.fault(PipeError("interrupted"))
            self.stuck = True  # also if there is another Ctrl-C, which waits no longer
            waiting = wait(futures, timeout=self._actors[0].stall_s).not_done
            self.stuck = bool(waiting)
            if waiting:
                logger.warning("interrupted, but %s", self._who_hangs(futures, waiting))
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
            raise error
        return [future.result() for future in futures]

    def _await(self, futures: Sequence[Future[T]]) -> None:
        """Wait until all have ended, as they do soon after the first error, or until one hangs.

        Raises:
            Stalled: the text names the hanging worker; other workers may wait for its locks, not for its payloads.
        """
        seen, since = self._progress(), time.monotonic()
        patience_s = self._actors[0].stall_s
        while waiting := wait(futures, timeout=_LOOK_S).not_done:
            stalled = [f.exception() for f in futures if f.done() and isinstance(f.exception(), Stalled)]
            if seen != (seen := self._progress()):
                since = time.monotonic()
            elif time.monotonic() > since + (min(_PATIENCE_S, patience_s) if stalled else patience_s):
                self.stuck = True
                raise Stalled(self._who_hangs(futures, waiting))

    def _who_hangs(self, futures: Sequence[Future[T]], waiting: Collection[Future[T]]) -> str:
        """Return the busy worker that does not end: not one that waits in this project's code for another."""
        called, patience_s = zip(self._threads, self._actors, futures, strict=True), self._actors[0].stall_s
        stacks = [(thread.stack(), actor) for thread, actor, future in called if future in waiting and actor.running]
        if not stacks:
            return f"nothing has happened for {patience_s:g} s, and no worker runs anything"
        elsewhere = [found for found in stacks if not Path(found[0][-1].filename).is_relative_to(_HERE)]
        stack, actor = (elsewhere or stacks)[0]
        where = f"running {actor.running}, step {actor.running_step}, for {patience_s:g} s"
        return f"worker {actor.worker} hangs: {where}; it is in\n{''.join(stack.format()).rstrip()}"

    def _progress(self) -> list[tuple[str, int, int]]:
        return [(actor.running, actor.running_step, actor.step) for actor in self._actors]

    def close(self) -> None:
        """End the threads, and wait for them, unless one hangs."""
        self._ended()
        for thread in self._threads:
            if not self.stuck:
                thread.join()


class _Thread(threading.Thread):
    """Does one thing after the other. The process may end while it is at something, as it may hang."""

    def __init__(self, worker: int) -> None:
        super().__init__(name=f"worker_{worker}", daemon=True)
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def stack(self) -> traceback.StackSummary:
        """Return where the thread is."""
        collects = gc.isenabled()
        gc.disable()  # until 3.11.8, CPython hangs if a thread's storage is collected while it lists frames (gh-106883)
        frame = sys._current_frames().get(self.ident or 0)
        if collects:
            gc.enable()
        return traceback.extract_stack(frame)

    def end(self) -> None:
        """End when all submitted calls are done."""
        self._calls.put(None)

    def run(self) -> None:
        while (submitted := self._calls.get()) is not None:
            future, call = submitted
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call, submitted  # they may keep a model alive


def _end(threads: Iterable[_Thread]) -> None:
    for thread in threads:
        thread.end()


def callers_settings() -> Callable[[], AbstractContextManager[None]]:
    """Return a context that lets another thread compute with the settings of the calling one.

    Torch keeps these settings by thread. The number of threads decides how a sum is divided, and so its last bits.
    """
    num_threads, grad, inference = torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in enabled()]
    cached, device = torch.is_autocast_cache_enabled(), torch.get_default_device()

    @contextmanager
    def settings() -> Iterator[None]:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            if casts:
                stack.enter_context(casting(casts, cached=cached))
            if device.type != "cpu":
                stack.enter_context(device)
            yield

    return settings
