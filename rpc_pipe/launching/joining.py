"""Joining a job: meeting the other workers over the chosen carrier, and the addresses at which each listens."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dependency import ConfigError, NotMet
from ..system.at_exit import at_exit
from ..tracing import run_folders
from ..workers.transport.carrier import Carrier
from ..workers.transport.forks import keep_from_forks, letting_go
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

_RPC_MEANS = (
    "torch RPC runs what it receives and authenticates nobody: anybody who reaches a worker's port can run code as "
    "you, and read and change the data in transit"
)
_KEY_MEANS = (
    "without a key file the job's key travels through torchrun's store: anybody who reaches it while the workers "
    "meet can take part"
)


@cache
def join(job: Job) -> Carrier:
    """Meet the other workers; once in the life of a process (pytorch#46491).

    Raises:
        ConfigError: strangers could come too, or the system allows too little.
        NotMet: not all came.
    """
    link.tell(kind="joining")
    try:
        with letting_go():
            carrier = _by_zmq(job) if job.transport == "zmq" else _by_rpc(job)
    except (TimeoutError, RuntimeError, OSError) as error:
        others = f"the other {job.num_workers - 1} workers within {job.join_timeout_s:g} s"
        raise NotMet(f"worker {job.worker} could not meet {others}: {error}") from error
    keep_from_forks(carrier)
    link.tell(kind="joined")
    return carrier


def _by_rpc(job: Job) -> Carrier:
    if job.interface != LOOPBACK:
        if not job.trust_network:
            trust = f"--trust-network ({TRUST}=on) if nobody else is in this network, or use --transport zmq"
            raise ConfigError(f"transport rpc beyond this host: {_RPC_MEANS}; pass {trust}")
        _warn(job, f"--trust-network: {_RPC_MEANS}")
    store = _store(job)  # torch's own would meet where workers were before a restart
    if not job.one_host:
        job, _ = _reached(job, Meeting(store))
    # Both, because init_rpc builds a gloo group besides TensorPipe's own connections (pytorch#42879).
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = job.interface
    from ..workers.transport.rpc import RpcLink  # here, so that others do without

    carrier = _carrier(job, RpcLink(job.worker, job.num_workers, job.init_method, job.join_timeout_s, store=store))
    at_exit(carrier.close)
    return carrier


def _by_zmq(job: Job) -> Carrier:
    try:
        from ..workers.transport.zeromq import ZmqLink
    except ImportError as error:
        raise ConfigError(f"transport zmq: needs {error.name}; pip install 'rpc-pipe[zmq]'") from error
    folder, network = None if job.port else _folder(job), None
    if job.port or not job.one_host or job.interface != LOOPBACK:
        network = _network(job)
    zmq = ZmqLink(job.worker, job.num_workers, folder, network, job.join_timeout_s)
    carrier = _carrier(job, zmq)
    at_exit(_leave, carrier, zmq, None if job.init_method.startswith("file://") else folder)
    return carrier


def _carrier(job: Job, link_to_others: RpcLink | ZmqLink) -> Carrier:
    """Meet the others over this link, and join it with the shorter ways within a host."""
    channels = Channels(job.worker, link_to_others.wakeup, job.ways) if job.shared_memory else None
    return Carrier(job.worker, job.num_workers, Messages(link_to_others, channels))


def _leave(carrier: Carrier, zmq: ZmqLink, own_folder: Path | None) -> None:
    carrier.close()
    if own_folder is not None:  # without a launcher, which would remove it
        run_folders.leave(own_folder)
    if zmq.refused:
        text = f"worker {carrier.worker} refused {zmq.refused} connections that did not prove to be of this job"
        link.tell(kind="text", text=text)


# --- meeting places and addresses


def _store(job: Job) -> Any:
    """Return torch's store where the workers meet: in the launcher's file, at its port, or torchrun's."""
    if job.init_method.startswith("file://"):
        return store_in(_at(job), job.num_workers)
    if job.init_method == "env://":
        return torchrun_store(job.worker, job.num_workers, job.join_timeout_s)
    host, _, port = job.init_method.removeprefix("tcp://").rpartition(":")
    return store_at(host, int(port), job.worker, job.num_workers, job.join_timeout_s)


def _at(job: Job) -> Path:
    """Return the file where the workers of one host meet. Its path is no URL: it may have any character."""
    return Path(job.init_method.removeprefix("file://"))


def _folder(job: Job) -> Path:
    """Return the folder for this host's unix sockets, which other users may not enter."""
    if job.init_method.startswith("file://"):
        return _at(job).parent
    names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"
    name = hashlib.sha256(repr([os.environ.get(name) for name in names]).encode()).hexdigest()[:16]
    folder = run_folders.root() / f"{run_folders.SOCKETS}{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    run_folders.enter(folder)
    return folder


def _network(job: Job) -> Network:
    """Return the addresses of workers over TCP."""
    from ..workers.transport.zeromq import Network

    secret = _secret(job)  # before others are waited for
    meeting = Meeting(_store(job))
    if job.init_method.startswith("file://"):
        host = address_of(job.interface, "127.0.0.1")
    else:
        job, host = _reached(job, meeting)

    def tell(place: str, address: str) -> None:
        meeting.leave(f"address-{job.worker}", f"{place}\n{address}")

    def ask(peer: int, timeout_s: float) -> tuple[str, str]:
        place, _, address = meeting.take(f"address-{peer}", timeout_s).partition("\n")
        return place, address

    port = job.port if job.worker == 0 else 0
    more = {"congestion": os.environ["RPC_PIPE_CONGESTION"]} if "RPC_PIPE_CONGESTION" in os.environ else {}
    return Network(_keys(job, meeting, secret), host, port, tell, ask, job.lost_after_s, **more)


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


def _keys(job: Job, meeting: Meeting, secret: bytes | None) -> Keys:
    """Return the keys of the job; without a secret of its own the workers agree on one."""
    from ..workers.transport.keys import Keys

    if secret is None:
        _warn(job, f"--trust-network: {_KEY_MEANS}")
        secret = _agreed(job, meeting, "secret").encode()
    return Keys(secret, _agreed(job, meeting, "name"), job.num_workers)


def _agreed(job: Job, meeting: Meeting, name: str) -> str:
    """Return a random value drawn by worker 0."""
    if job.worker == 0:
        meeting.leave(name, secrets.token_hex(32))
    return meeting.take(name, job.join_timeout_s)


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
