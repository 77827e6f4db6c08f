"""The job of this process: one worker, started by a launcher or torchrun, or all workers in one process.

The launcher sets the same variables as torchrun (RANK, WORLD_SIZE), and RPC_PIPE_*; under torchrun the workers meet at
its store.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..boards.run_folders import NEWCOMER
from ..dependency import ConfigError
from ..dependency.pipeline_options import TRANSPORTS as TRANSPORTS
from . import LOOPBACK

#: exit codes
FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: environment variable set by the launcher: where local workers meet
INIT = "RPC_PIPE_INIT"
#: environment variables: whether the job continues without workers that die, and the number of hosts with launchers
ELASTIC, HOSTS = "RPC_PIPE_ELASTIC", "RPC_PIPE_HOSTS"
#: environment variable: seconds that workers are missing before stages and replicas are chosen again
RESHAPE_AFTER = "RPC_PIPE_RESHAPE_AFTER"
#: environment variable set by `--rejoin`: whether newcomers take the places of workers that have died
REJOINS = "RPC_PIPE_REJOIN"
TRANSPORT, TRUST, PORT, KEY = "RPC_PIPE_TRANSPORT", "RPC_PIPE_TRUST_NETWORK", "RPC_PIPE_PORT", "RPC_PIPE_KEY_FILE"
#: the carriers of messages between workers; the first is the default


@dataclass(frozen=True)
class Job:
    """One process among several, each a worker or a member of one; with `local`, one process for all workers."""

    rank: int
    num_processes: int
    #: where the workers meet, in the form of `init_rpc`
    init_method: str
    #: the network interface by which peers reach this worker; empty: workers of other hosts choose it
    interface: str
    #: seconds to wait for the other workers at the start
    join_timeout_s: float = 120.0
    #: whether workers of one host use shared memory between them
    shared_memory: bool = True
    #: one of TRANSPORTS
    transport: str = TRANSPORTS[0]
    #: whether all workers are on one host
    one_host: bool = True
    #: whether the user accepts that anybody in this host's network may run code in a worker
    trust_network: bool = False
    #: TCP port of worker 0; 0: any port, or none if none is needed
    port: int = 0
    #: file with the secret of the job; any reader of it may take part
    key_file: Path | None = None
    #: seconds that the connection to a worker of another host may be broken
    lost_after_s: float = 20.0
    #: number of this process on its host
    place: int = 0
    #: number of processes of the job on this host
    processes_here: int = 1
    #: number of processes that form a worker together
    members: int = 1
    #: whether it continues without workers that die
    elastic: bool = False
    #: least and most workers after a change of stages and replicas; None: both stay
    shapes: tuple[int, int] | None = None
    #: whether newcomers take the places of workers that have died
    rejoins: bool = False
    #: whether this process takes the place of a worker that has died
    newcomer: bool = False

    @property
    def worker(self) -> int:
        """The worker that this process is, or is a member of."""
        return self.rank // self.members

    @property
    def num_workers(self) -> int:
        """The number of workers of the job."""
        return self.num_processes // self.members

    @property
    def member(self) -> int:
        """Which of the members of its worker this process is."""
        return self.rank % self.members


def current_job(environ: Mapping[str, str] | None = None) -> Job | None:
    """Return the job that this process was started for; None: it was started alone.

    Raises:
        ConfigError: variables of torchrun or of ours are only partly set, or make no sense.
    """
    environ = os.environ if environ is None else environ
    local = environ.get(INIT)
    wanted = ("RANK", "WORLD_SIZE") if local else _TORCHRUN
    present = [name for name in wanted if name in environ]
    settings: dict[str, Any] = dict(
        join_timeout_s=seconds(environ, "RPC_PIPE_JOIN_TIMEOUT", Job.join_timeout_s),
        shared_memory=_on(environ, "RPC_PIPE_SHARED_MEMORY", "on"),
        transport=_transport(environ),
        trust_network=_on(environ, TRUST, "off"),
        port=_number(environ, PORT, 0),
        key_file=Path(environ[KEY]) if KEY in environ else None,
        lost_after_s=seconds(environ, "RPC_PIPE_LOST_AFTER", Job.lost_after_s),
        elastic=(has_shapes := ":" in environ.get(ELASTIC, "")) or _on(environ, ELASTIC, "off"),
        shapes=tuple(map(int, environ[ELASTIC].split(":"))) if has_shapes else None,
        rejoins=_on(environ, REJOINS, "off"),
        newcomer=_on(environ, NEWCOMER, "off"),
    )
    if not present:
        return None
    if missing := [name for name in wanted if name not in environ]:
        there = ", ".join(present)
        raise ConfigError(f"{', '.join(missing)}: not set, but {there} is, as by torchrun; set all, or unset {there}")
    rank, count = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < count:
        raise ConfigError(f"RANK {rank}: must be 0 to WORLD_SIZE - 1 = {count - 1}")
    if local:
        interface, alone = environ.get("RPC_PIPE_INTERFACE", LOOPBACK), HOSTS not in environ
        place, here = (rank, count) if alone else (_number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE"))
        return Job(rank, count, local, interface, one_host=alone, place=place, processes_here=here, **settings)
    interface, one_host = _place(environ, count)
    place, here = _number(environ, "LOCAL_RANK", rank), _number(environ, "LOCAL_WORLD_SIZE", count)
    return Job(rank, count, "env://", interface, one_host=one_host, place=place, processes_here=here, **settings)


def own_part(transport: str | None, num_workers: int | None, members: int = 1) -> tuple[Job | None, int]:
    """Return (this process's job, None if it has all workers; the number of workers).

    Args:
        transport: that a script asks for.
        num_workers: that a script asks for; with members, the number of processes.
        members: how many processes are one worker.

    Raises:
        ConfigError: they cannot be had here, or as `current_job`.
    """
    job = current_job()
    if members > 1 and (job is None or job.transport == "local" or transport == "local"):
        raise ConfigError(f"members={members}: are processes, not threads; start them by rpc-pipe run or torchrun")
    if job is None:
        return None, 1 if num_workers is None else num_workers
    if num_workers not in (None, job.num_workers):
        raise ConfigError(f"num_workers {num_workers}: this job has {job.num_workers} workers; start as many")
    if transport not in (None, job.transport):
        if "local" in (transport, job.transport) and job.num_workers > 1:
            one = "one process" if job.transport == "local" else f"{job.num_workers} processes"
            raise ConfigError(f"transport {transport!r}: this job was started as {one}; leave it out, or type it")
        job = replace(job, transport=transport)
    if job.num_processes % members or job.processes_here % members:
        there = f"the job's {job.num_processes} processes, {job.processes_here} of them on this host"
        raise ConfigError(f"members={members}: must divide {there}; start a multiple of {members} on each host")
    job = replace(job, members=members)
    return None if job.transport == "local" else job, job.num_workers


def _place(environ: Mapping[str, str], num_processes: int) -> tuple[str, bool]:
    """Return the interface by which peers reach this worker, and whether all workers are on this host."""
    said = environ.get("RPC_PIPE_INTERFACE")
    from .interfaces import interface_towards  # of hosts of a cluster

    interface = said or interface_towards(environ["MASTER_ADDR"])
    here = environ.get("LOCAL_WORLD_SIZE")
    if here is None:
        return interface, interface == LOOPBACK
    if here == str(num_processes):
        return environ.get("RPC_PIPE_INTERFACE", LOOPBACK), True
    # The first host may resolve its name to loopback, as Debian does, where peers cannot reach it.
    return said or ("" if interface == LOOPBACK else interface), False


def _transport(environ: Mapping[str, str]) -> str:
    if (name := environ.get(TRANSPORT, Job.transport)) not in TRANSPORTS:
        raise ConfigError(f"{TRANSPORT} {name!r}: must be {', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]}")
    return name


def _on(environ: Mapping[str, str], name: str, usual: str) -> bool:
    value = environ.get(name, usual)
    if value not in ("on", "off"):
        raise ConfigError(f"{name} {value!r}: must be on or off")
    return value == "on"


def seconds(environ: Mapping[str, str], name: str, usual: float) -> float:
    """Return a number of seconds from the environment.

    Raises:
        ConfigError: it is none above 0.
    """
    try:
        found = float(environ.get(name, usual))
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"{name} {environ[name]!r}: must be a number of seconds above 0")
    return found


def _number(environ: Mapping[str, str], name: str, usual: int = 0) -> int:
    try:
        return int(environ.get(name, usual))
    except ValueError:
        raise ConfigError(f"{name} {environ[name]!r}: must be a whole number") from None
