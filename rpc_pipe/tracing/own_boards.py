"""The boards of this process's workers: kept while they train, shown to other machines, cleared up at the end."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from ..workers.hooks import StepRecord
from . import run_folders
from .board import BoardWriter
from .listing import list_program, name_of
from .mirror import WATCHED, Mirror, RemoteBoards, pack_answer
from .training import Training

#: on this signal a worker writes the stacks of its threads to `stacks-<process>`; users have others for their own
_STACKS = signal.SIGRTMIN + 7
#: a worker lists what it runs for so many numbers of microbatches; the other programs are parts of larger ones
_MOST_LISTED = 32

#: by worker, until the end, which they must tell
_boards: dict[int, OwnBoard] = {}
#: (folder, worker) of the boards that this process writes, and its other files
_shown: set[tuple[Path, int]] = set()
_files: set[Path] = set()


class OwnBoard(BoardWriter):
    """The board of a worker of this process, beside it the listings of what the worker runs.

    Args:
        folder: of the run.
    """

    def __init__(self, training: Training, worker: int, folder: Path) -> None:
        self._program = WeakMethod(training.program)
        self._spec, self._order = training.spec, training.order
        self._worker = worker
        self._folder = folder
        #: by number of microbatches; replaced, not changed, as other threads read it
        self.listings: dict[int, dict[str, Any]] = {}
        run_folders.remove_listings(folder, worker)
        self._list(training.spec.num_microbatches)
        super().__init__(folder / f"worker-{worker}", _header(training, worker))

    def step_finished(self, record: StepRecord) -> None:
        if record.num_microbatches not in self.listings and len(self.listings) < _MOST_LISTED:
            self._list(record.num_microbatches)
        super().step_finished(record)

    def answer(self, seen: int) -> bytes:
        """Return what is new since version `seen`, for those who look from elsewhere; everything if it is -1."""
        return pack_answer(self.board, self.listings, seen)

    def _list(self, num_microbatches: int) -> None:
        program = self._program()
        if program is not None:
            spec = replace(self._spec, num_microbatches=num_microbatches)
            listing = list_program(spec, self._worker, self._order, program(self._worker, num_microbatches))
            self.listings = {**self.listings, num_microbatches: listing}
            run_folders.write_listing(self._folder, listing)


def _header(training: Training, worker: int) -> dict[str, Any]:
    return {
        "worker": worker,
        "num_workers": training.spec.num_workers,
        "process": run_folders.identity(),
        "host": socket.gethostname(),
        "device": str(training.actors[0].courier.device),
        "schedule": name_of(training.spec),
        "microbatches": training.spec.num_microbatches,
        "shards": training.shards(worker),
        "cores": len(os.sched_getaffinity(0)),
        "started": time.time(),
        "clock_ns": time.perf_counter_ns(),
        "stacks_signal": _STACKS,
    }


@cache
def _folder() -> Path | None:
    """One for the life of the process: the boards of its next pipeline replace those of the last."""
    return run_folders.folder(os.environ)


def keep_boards(training: Training) -> None:
    """Keep boards of the workers of this process in the folder of the run, unless there are to be none.

    Raises:
        ConfigError, OSError: they cannot be kept.
    """
    folder = _folder()
    if folder is None:
        return
    _offer_stacks(folder)
    _files.add(folder / WATCHED)

    def board(worker: int) -> OwnBoard:
        made = _boards[worker] = OwnBoard(training, worker, folder)
        _shown.add((folder, worker))
        return made

    training.listen(board)
    for actor in training.actors:
        if isinstance(actor.carrier, RemoteBoards):
            actor.carrier.exhibit = _boards[actor.worker].answer
            _keep_mirror(actor.carrier, folder)


@cache
def _keep_mirror(carrier: RemoteBoards, folder: Path) -> None:
    """Let the first worker of a machine show those of the others too. torchrun starts ranks machine by machine."""
    size, local = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if local == "0" and size.isdigit() and int(size) < carrier.num_workers:
        own = range(carrier.worker, carrier.worker + int(size))
        remote = [worker for worker in range(carrier.num_workers) if worker not in own]
        Mirror(carrier, folder, remote).start()
        _shown.update((folder, worker) for worker in remote)


@cache
def _offer_stacks(folder: Path) -> None:
    """Write the stacks of all threads when asked: from C, without the interpreter, so also while one is stuck."""
    path = folder / f"stacks-{os.getpid()}"
    faulthandler.register(_STACKS, path.open("w"))
    _files.add(path)


@atexit.register
def _leave() -> None:
    """Say that the workers have left; clear up, unless a launcher does, which still wants to read."""
    for board in _boards.values():
        board.close()
    if run_folders.FOLDER not in os.environ:
        written = {file for folder, worker in _shown for file in run_folders.files_of(folder, worker)}
        for file in _files | written:
            file.unlink(missing_ok=True)
            with suppress(OSError):  # others are still there
                file.parent.rmdir()
