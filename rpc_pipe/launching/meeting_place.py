"""A meeting place: where the processes that carry for a set of workers find each other, and how they join.

    root ── "plane 1" ── "epoch 2"

The launcher, torchrun or a port gives all processes of a job the root. A place inside another one has a separate folder
and prefix, so nothing that was left in one place is found in another. A process may join several places, one after the
other; it leaves all of them when it ends.
"""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..boards import run_folders
from ..boards.own_boards import follow_carrier
from ..dependency import ConfigError, EpochEnds, NotMet
from ..system.at_exit import at_exit
from ..workers.transport.carrier import Carrier, Plane
from ..workers.transport.meeting import Meeting, store_at, store_in, torchrun_store
from ..workers.transport.messages import Messages
from ..workers.transport.shared_memory import Channels
from . import LOOPBACK
from . import launcher_link as link
from .interfaces import address_of, interface_towards, read_key
from .job import KEY, TRUST, Job

if TYPE_CHECKING:
    from ..workers.transport.keys import Keys
    from ..workers.transport.rpc import RpcLink
    from ..workers.transport.zeromq import Network, ZmqLink

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
            from .hosts_meeting import HostsMeeting

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


_RPC_MEANS = "torch RPC authenticates nobody: anybody who reaches a worker's port can run code as you, and read data"
_KEY_MEANS = "without a key file the key travels through torchrun's store: anybody who reaches it can take part"


#: the carriers of this process that have not been closed, and their links, by the place where they have met
_carriers: dict[MeetingPlace, tuple[Carrier, RpcLink | ZmqLink]] = {}


def join(place: MeetingPlace, cancelled: Callable[[], None] | None = None) -> Carrier:
    """Return this process's carrier to the other workers of a place; the first call meets them.

    Args:
        cancelled: of a later epoch: raises EpochEnds when its workers cannot meet any more.

    Raises:
        ConfigError: strangers could join too, or the system allows too little.
        NotMet: not all came.
    """
    if (known := _carriers.get(place)) is not None:
        return known[0]
    job = place.job
    for count in {other.job.members for other in _carriers if cancelled is None} - {job.members}:
        if job.transport == "rpc" or min(count, job.members) > 1:
            once = f"an earlier pipeline has {count}, and a process meets others by rpc, and as a member, once"
            raise ConfigError(f"members={job.members}: {once}; take as many, or --transport zmq and none in one")
    if cancelled is None:
        link.tell(kind="joining")
    try:
        with letting_go():
            to_others = _by_zmq(place, cancelled) if job.transport == "zmq" else _by_rpc(place)
            channels = Channels(job.worker, to_others.wakeup) if job.shared_memory else None
            carrier = Carrier(job.worker, place.workers, Messages(to_others, channels), Plane(job.member, job.members))
    except EpochEnds:
        raise
    except (TimeoutError, RuntimeError, OSError) as error:
        others = f"the other {len(place.workers) - 1} workers within {job.join_timeout_s:g} s"
        raise NotMet(f"worker {job.worker} could not meet {others}: {error}") from error
    follow_carrier(carrier)
    _carriers[place] = carrier, to_others
    _once_at_exit(_leave_all)
    if cancelled is None:
        link.tell(kind="joined")
    return carrier


def drop(place: MeetingPlace) -> None:
    """Close this process's carrier to the workers of a place at once, without goodbye: they meet in another place."""
    if (known := _carriers.pop(place, None)) is not None:
        known[1].close()
        place.leave()
        del known
        gc.collect()


def _close(place: MeetingPlace) -> None:
    carrier, to_others = _carriers.pop(place)
    carrier.close()
    place.leave()
    if to_others.refused:
        text = f"worker {carrier.worker} refused {to_others.refused} connections that did not prove to be of this job"
        link.tell(kind="text", text=text)


_once_at_exit = cache(at_exit)


def _leave_all() -> None:
    for place in list(_carriers):
        _close(place)


def _by_rpc(place: MeetingPlace) -> RpcLink:
    job = place.job
    if job.interface != LOOPBACK:
        if not job.trust_network:
            trust = f"--trust-network ({TRUST}=on) if nobody else is in this network, or use --transport zmq"
            raise ConfigError(f"transport rpc beyond this host: {_RPC_MEANS}; pass {trust}")
        _warn(job, f"--trust-network: {_RPC_MEANS}")
    store = place.store()  # torch's default store would meet where workers were before a restart
    if not job.one_host:
        job, _ = _reached(job, Meeting(store))
    # Both, because init_rpc builds a gloo group besides TensorPipe's connections (pytorch#42879).
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = job.interface
    from ..workers.transport.rpc import RpcLink

    return RpcLink(job.worker, place.workers, job.init_method, job.join_timeout_s, store=store)


def _by_zmq(place: MeetingPlace, cancelled: Callable[[], None] | None) -> ZmqLink:
    job = place.job
    try:
        from ..workers.transport.zeromq import ZmqLink
    except ImportError as error:
        raise ConfigError(f"transport zmq: needs {error.name}; pip install '.[zmq]'") from error
    folder, network = None if job.port else place.folder(), None
    if job.port or not job.one_host or job.interface != LOOPBACK:
        network = _network(place, cancelled)
    return ZmqLink(job.worker, place.workers, folder, network, job.join_timeout_s, cancelled)


@cache
def mesh_of_members(job: Job, kind: str, identity: str) -> Any:
    """Return the mesh of the members of this process's worker, when all of them have joined.

    They are torch's default process group while the pipeline is called, unless the script has made one of all
    processes. Elsewhere it has this process alone: metrics would add up the members' values of the same rows.

    Args:
        kind: of the device, such as `cuda`.
        identity: of the device, alike in all processes; empty: of a CPU.

    Raises:
        NotMet: not all came.
        ConfigError: members share a device, which NCCL cannot do, and gloo ends by a SIGSEGV (torch 2.11).
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        every = init_device_mesh(kind, (job.num_workers, job.members), mesh_dim_names=("worker", "member"))
        return every["member"]
    place = root_of(job).sub(f"members {job.worker}", range(job.members))
    if job.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    try:
        store = place.store()
        if identity:
            meeting = Meeting(store)
            meeting.leave(f"device-{job.member}", identity)
            devices = {meeting.take(f"device-{member}", job.join_timeout_s) for member in range(job.members)}
            if len(devices) < job.members:
                raise ConfigError(f"members={job.members}: share a {kind} device; give each its own, or device=cpu")
        timeout = timedelta(seconds=job.join_timeout_s)
        dist.init_process_group(store=store, rank=job.member, world_size=job.members, timeout=timeout)
        at_exit(dist.destroy_process_group)
        mesh = init_device_mesh(kind, (job.members,), mesh_dim_names=("member",))
        mesh.get_group()
        dist.group.WORLD = dist.new_group([job.member], use_local_synchronization=True)
        return mesh
    except (TimeoutError, RuntimeError, OSError) as error:
        raise NotMet(f"process {job.rank} could not meet the members of worker {job.worker}: {error}") from error


def _network(place: MeetingPlace, cancelled: Callable[[], None] | None) -> Network:
    """Return the addresses of workers over TCP."""
    from ..workers.transport.zeromq import Network

    job = place.job
    secret = _secret(job)  # before the wait for peers
    meeting = place.meeting(cancelled)
    if place.on_this_host:
        host = address_of(job.interface, "127.0.0.1")
    else:
        job, host = _reached(job, meeting)

    port = job.port if job.worker == min(place.workers) else 0
    more = {"congestion": os.environ["RPC_PIPE_CONGESTION"]} if "RPC_PIPE_CONGESTION" in os.environ else {}
    return Network(_keys(place, meeting, secret), host, port, meeting, job.lost_after_s, **more)


def _secret(job: Job) -> bytes | None:
    """Return the job's secret from its file; None: the workers agree on one when they meet.

    Raises:
        ConfigError: the file holds none, or there must be one.
    """
    if job.key_file is not None:
        return read_key(job.key_file)
    if job.trust_network:
        return None
    key = f"needs a key: `rpc-pipe key FILE` makes one, copy it to all hosts and set {KEY}=FILE"
    raise ConfigError(f"transport zmq beyond this host: {key}; or pass --trust-network ({TRUST}=on): {_KEY_MEANS}")


def _keys(place: MeetingPlace, meeting: Meeting, secret: bytes | None) -> Keys:
    """Return the keys of the job; without a secret from the user the workers agree on one."""
    from ..workers.transport.keys import Keys

    if secret is None:
        _warn(place.job, f"--trust-network: {_KEY_MEANS}")
        secret = _agreed(place, meeting, "secret").encode()
    return Keys(secret, _agreed(place, meeting, "name"), place.workers)


def _agreed(place: MeetingPlace, meeting: Meeting, name: str) -> str:
    """Return a random value drawn by the first worker."""
    if place.job.worker == min(place.workers):
        meeting.leave(name, secrets.token_hex(32))
    return meeting.take(name, place.job.join_timeout_s)


def _reached(job: Job, meeting: Meeting) -> tuple[Job, str]:
    """Return the job with the interface by which workers of other hosts reach this one, and its address.

    If the environment does not name the interface, workers of other hosts determine it.
    """
    if job.interface:
        address = address_of(job.interface, os.environ["MASTER_ADDR"])
        meeting.leave("elsewhere", address)
        return job, address
    try:
        elsewhere = meeting.take("elsewhere", job.join_timeout_s)
    except TimeoutError as error:
        address = f"MASTER_ADDR {os.environ['MASTER_ADDR']}"
        advice = "take an address of one host, or set RPC_PIPE_INTERFACE on all hosts (lo, if all are one machine)"
        raise TimeoutError(f"no worker is on another host than {address}: {advice}") from error
    interface = interface_towards(elsewhere)
    return replace(job, interface=interface), address_of(interface, elsewhere)


def _warn(job: Job, text: str) -> None:
    """Warn the user once."""
    if job.worker == 0:
        link.tell(kind="text", text=text)


_DESCRIPTORS = Path("/proc/self/fd")
#: addresses where this process listens for other workers
_listens_at: set[object] = set()


@contextmanager
def letting_go() -> Iterator[None]:
    """Let forks of this process have no socket that begins to listen in the body, and no connection to it."""
    before = {address for _, address, listens in _sockets() if listens}
    yield
    found = {address for _, address, listens in _sockets() if listens} - before
    if found and not _listens_at:
        os.register_at_fork(after_in_child=_let_go)
    _listens_at.update(found)


def _let_go() -> None:
    with suppress(OSError):  # there is no descriptor left
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor, address, _ in _sockets():
            if address in _listens_at:
                os.dup2(nowhere, descriptor, inheritable=False)  # not closed: the opener may close it again
        os.close(nowhere)


def _sockets() -> Iterator[tuple[int, object, bool]]:
    """Yield this process's sockets: descriptor, local address, which accepted ones share, and whether it listens."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else []:
        with suppress(OSError):  # it was that of the folder itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found = socket.socket(fileno=int(name))
                try:
                    listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                    yield int(name), found.getsockname(), listens
                finally:
                    found.detach()
