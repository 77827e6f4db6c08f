"""A meeting place: where the processes that carry for a set of workers find each other.

    root ── "plane 1" ── "epoch 2"

The launcher, torchrun or a port gives all processes of a job the root. A place inside another one has a separate folder
and prefix, so nothing that was left in one place is found in another.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..tracing import run_folders
from ..workers.transport.meeting import Meeting, store_at, store_in, torchrun_store
from .job import Job

_FILE = "file://"


@dataclass(frozen=True)
class MeetingPlace:
    """One place of a job; the processes that meet there make equal places, except for their number."""

    job: Job
    #: the numbers of the processes in this place
    workers: frozenset[int]
    #: names of the places from the root to this one, such as ("plane 1", "epoch 2")
    names: tuple[str, ...] = ()

    def sub(self, name: str, workers: Iterable[int] | None = None) -> MeetingPlace:
        """Return a place inside this one, for `workers`; None: the same workers."""
        found = self.workers if workers is None else frozenset(workers)
        return replace(self, names=(*self.names, name), workers=found)

    @property
    def on_this_host(self) -> bool:
        """Whether the root is a file of this host that the launcher removes."""
        return self.job.init_method.startswith(_FILE)

    def store(self) -> Any:
        """Return torch's store of this place: a file, or a part of the store at the root's port or of torchrun."""
        if self.on_this_host:
            # The root's path is no URL: it may have any character.
            return store_in(self._folder() / Path(self.job.init_method.removeprefix(_FILE)).name, len(self.workers))
        store = _root_store(self.job)
        for name in self.names:
            store = PrefixStore(name, store)
        return store

    def meeting(self, cancelled: Callable[[], None] | None = None) -> Meeting:
        """Return the records of this place; launchers of several hosts pass them on.

        Args:
            cancelled: raises an error when no record can arrive any more.
        """
        if self.on_this_host and not self.job.one_host:
            from .hosts_meeting import HostsMeeting  # few jobs have several hosts and launchers

            return HostsMeeting("/".join(self.names), cancelled)
        return Meeting(self.store())

    def folder(self) -> Path:
        """Return the folder for this host's unix sockets, which other users may not enter."""
        if not self.on_this_host:
            run_folders.enter(_torchrun_folder())
        return self._folder()

    def _folder(self) -> Path:
        root = Path(self.job.init_method.removeprefix(_FILE)).parent if self.on_this_host else _torchrun_folder()
        path = root.joinpath(*(name.replace(" ", "-") for name in self.names))
        if self.names:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def leave(self) -> None:
        """Remove this process's files from the disk; the last process removes the folder."""
        if self.names:
            with suppress(OSError):  # other processes are there
                self._folder().rmdir()
        elif not self.on_this_host:
            run_folders.leave(_torchrun_folder())


def root_of(job: Job) -> MeetingPlace:
    """Return the place where all processes of a job could meet."""
    return MeetingPlace(job, frozenset(range(job.num_processes)))


def place_of(job: Job) -> MeetingPlace:
    """Return the place where the processes of this one's plane meet; a newcomer is alone at first."""
    if job.newcomer:
        return root_of(job).sub(f"newcomer {os.getpid()}", [job.worker])
    return root_of(job) if job.members == 1 else root_of(job).sub(f"plane {job.member}", range(job.num_workers))


@cache
def _root_store(job: Job) -> Any:
    """Return the store at the root; once, as it finds out which processes are of this attempt."""
    if job.init_method == "env://":
        return torchrun_store(job.rank, job.num_processes, job.join_timeout_s)
    host, _, port = job.init_method.removeprefix("tcp://").rpartition(":")
    return store_at(host, int(port), job.rank, job.num_processes, job.join_timeout_s)


def _torchrun_folder() -> Path:
    """Return the folder of this host's workers where torchrun has started them."""
    names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"
    name = hashlib.sha256(repr([os.environ.get(name) for name in names]).encode()).hexdigest()[:16]
    folder = run_folders.root() / f"{run_folders.SOCKETS}{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
