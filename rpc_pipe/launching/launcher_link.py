"""A worker's side towards those who started it and those who watch it.

The launcher's leash ends the worker when the launcher is gone; what the worker tells goes to the launcher. Its board
is for whoever looks.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from ..tracing import run_folders
from ..tracing.board import BoardWriter
from ..tracing.listing import list_program
from ..tracing.mirror import WATCHED, Mirror, RemoteBoards, exhibit
from ..tracing.training import Training

logger = logging.getLogger(__name__)

#: environment variables: descriptor to write messages to, descriptor to read orders from
TELL, LEASH = "RPC_PIPE_TELL", "RPC_PIPE_LEASH"
#: an order of the launcher: finish the step and stop
STOP = b"s"
#: on this signal a worker writes the stacks of its threads to `stacks-<process>`; users have others for their own
_STACKS = signal.SIGRTMIN + 7


class Attachable(Training, Protocol):
    """A training that the launcher can stop."""

    def request_stop(self) -> None:
        """Ask all workers to stop after the step that runs now."""


_lock = threading.Lock()
_pipelines: WeakSet[Attachable] = WeakSet()
_writers: dict[Path, BoardWriter] = {}
#: what this process has for watchers
_files: set[Path] = set()
_stop_requested = False
_instead: Callable[[dict[str, Any]], None] | None = None


def present() -> bool:
    """Tell whether a launcher is there."""
    return TELL in os.environ


def tell(**message: Any) -> None:
    """Send a message to the launcher, or to who took its place in this process."""
    if present():
        with _lock, open(int(os.environ[TELL]), "w", closefd=False) as pipe:
            pipe.write(json.dumps(message) + "\n")
    elif _instead is not None:
        _instead(message)


def tell_instead(handler: Callable[[dict[str, Any]], None]) -> None:
    """Without a launcher, as under torchrun, let `handler` have the messages of this process."""
    global _instead
    _instead = handler


def hold_leash() -> None:
    """Watch the launcher from a thread: do as it orders, and end at once when it is gone."""
    if LEASH in os.environ:
        threading.Thread(target=_follow, args=(int(os.environ[LEASH]),), name="leash", daemon=True).start()


def _follow(descriptor: int) -> None:
    global _stop_requested
    while order := os.read(descriptor, 1):
        if order == STOP:
            _stop_requested = True
            for pipeline in list(_pipelines):
                pipeline.request_stop()
    os._exit(1)  # the launcher is gone, however it went


def attach(pipeline: Attachable) -> None:
    """Pass the launcher's orders on to `pipeline` and let watchers see what its workers do."""
    _pipelines.add(pipeline)
    if _stop_requested:
        pipeline.request_stop()
    try:
        folder = _folder()
        if folder is not None:
            _keep_boards(pipeline, folder)
    except Exception as error:  # nothing depends on being watched
        logger.warning("this run cannot be watched: %s: %s", type(error).__name__, error)


@cache
def _folder() -> Path | None:
    """One for the life of the process: the boards of its next pipeline replace those of the last."""
    return run_folders.folder(os.environ)


def _keep_boards(pipeline: Training, folder: Path) -> None:
    spec = pipeline.spec
    _offer_stacks(folder)

    def board(worker: int) -> BoardWriter:
        program, shards = pipeline.program(worker), pipeline.shards(worker)
        listed = list_program(spec, worker, pipeline.order, program)
        run_folders.write_program(folder, worker, listed)
        header = {
            "worker": worker,
            "num_workers": spec.num_workers,
            "process": run_folders.identity(),
            "host": socket.gethostname(),
            "device": str(pipeline.actors[0].courier.device),
            "schedule": listed["schedule"],
            "microbatches": spec.num_microbatches,
            "shards": shards,
            "cores": len(os.sched_getaffinity(0)),
            "started": time.time(),
            "clock_ns": time.perf_counter_ns(),
            "stacks_signal": _STACKS,
        }
        writer = BoardWriter(
            folder / f"worker-{worker}",
            header,
            num_actions=len(program),
            num_arrivals=sum(need.carries for entry in program for need in entry.pulled),
            num_layers=sum(number for _, _, number in shards),
        )
        _writers[folder / f"worker-{worker}"] = writer  # kept until the end, which it must tell
        _files.update((folder / f"plan-{worker}", folder / f"worker-{worker}", folder / WATCHED))
        return writer

    pipeline.listen(board)
    for actor in pipeline.actors:
        if isinstance(actor.carrier, RemoteBoards):
            actor.carrier.exhibit = exhibit(folder, actor.worker)
            _keep_mirror(actor.carrier, folder)


@cache
def _keep_mirror(carrier: RemoteBoards, folder: Path) -> None:
    """Let the first worker of a machine show those of the others too. torchrun starts ranks machine by machine."""
    size, local = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if local == "0" and size.isdigit() and int(size) < carrier.num_workers:
        own = range(carrier.worker, carrier.worker + int(size))
        remote = [worker for worker in range(carrier.num_workers) if worker not in own]
        Mirror(carrier, folder, remote).start()
        _files.update(folder / f"{kind}-{worker}" for kind in ("worker", "plan") for worker in remote)


@cache
def _offer_stacks(folder: Path) -> None:
    """Write the stacks of all threads when asked: from C, without the interpreter, so also while one is stuck."""
    path = folder / f"stacks-{os.getpid()}"
    faulthandler.register(_STACKS, path.open("w"))
    _files.add(path)


@atexit.register
def _leave_boards() -> None:
    """Say that the workers have left; clear up, unless a launcher does, which still wants to read."""
    for writer in _writers.values():
        writer.close()
    if run_folders.FOLDER not in os.environ:
        for file in _files:
            file.unlink(missing_ok=True)
            with suppress(OSError):  # others are still there
                file.parent.rmdir()
