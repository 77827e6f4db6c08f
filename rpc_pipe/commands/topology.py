"""The file format of `plan --topology`: memory and speed of each worker, and the links between them.

    {"workers": [{"memory": "8GB", "speed": 1.0}, {"memory": "4GB", "speed": 0.5, "uplink": "2GB"}],
     "link": {"latency_ms": 0.2, "bandwidth": "1GB"},
     "links": {"0-1": {"latency_ms": 5, "bandwidth": "100MB"}}}

Where many are alike, a worker has a "count", and a level gives the links inside each group of its number of neighbours:

    {"workers": [{"count": 1024, "memory": "80GB"}], "link": {"latency_ms": 0.5, "bandwidth": "5GB"},
     "levels": {"8": {"latency_ms": 0.01, "bandwidth": "200GB"}, "64": {"latency_ms": 0.1, "bandwidth": "25GB"}}}

Bandwidths are bytes a second; an uplink's is a worker's rate to all other workers together. A link is given once for
both ways, or `1-0` beside `0-1`.
"""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..planning.plan import from_json_value
from ..planning.profile import Machines
from ..planning.simulator import Levels, Link
from ..system.files import DAMAGED, read_json
from .options import read_ends, read_group
from .readers import some

#: measured link between processes of one machine, through shared memory
HERE = Link(0.3, 1e6)
#: measured collectives of FSDP2 between two processes of one machine, over gloo: its copies count as travel
AMONG_MEMBERS = Link(1.5, 0.6e6)
#: the same of the sums of tensor parallelism, with DTensor's work on a linear layer, and the work that members repeat
SUMMING_MEMBERS = Link(1.2, 0.22e6)
_EXAMPLE = '{"workers": [{"memory": "8GB", "speed": 1.0}], "links": {"0-1": {"latency_ms": 5, "bandwidth": "1GB"}}}'


@dataclass(frozen=True)
class _Worker:
    memory: str = ""
    speed: float = 1.0
    uplink: str = ""
    count: int = 1


@dataclass(frozen=True)
class _Direction:
    latency_ms: float = 0.0
    bandwidth: str = ""


@dataclass(frozen=True)
class _Topology:
    workers: tuple[_Worker, ...]
    link: _Direction = _Direction(HERE.latency, f"{HERE.bandwidth / 1e3:g}MB")
    links: Mapping[str, _Direction] = field(default_factory=dict)
    levels: Mapping[str, _Direction] = field(default_factory=dict)


def read_topology(path: str) -> Machines:
    """Read the machines from a file.

    Raises:
        ConfigError: the file cannot be read, or holds an impossible value.
    """
    where = f"--topology {path}"
    return machines_of(where, read_json(Path(path), where))


def machines_of(where: str, told: Any) -> Machines:
    """Return the machines from the contents of such a file, or of a profile.

    Raises:
        ConfigError: the text holds an impossible value.
    """
    try:
        found: _Topology = from_json_value(_Topology, told, "the topology")
    except DAMAGED as error:
        raise ConfigError(f"{where}: is no topology, such as {_EXAMPLE}: {error}") from None
    workers = [worker for worker in found.workers for _ in range(worker.count)]
    if not (count := len(workers)):
        raise ConfigError(f"{where}: workers: must list at least one")
    for worker in found.workers:
        if worker.speed <= 0:
            raise ConfigError(f"{where}: speed {worker.speed:g}: must be above 0")
    limits = [_read(where, "memory", worker.memory) if worker.memory else None for worker in workers]
    links = {}
    for ends, way in found.links.items():
        a, b = read_ends(f"{where}: link {ends!r}", ends, count)
        links[a, b] = _link(where, way)
        if f"{b}-{a}" not in found.links:
            links[b, a] = links[a, b]
    levels = sorted((read_group(f"{where}: level", size), _link(where, way)) for size, way in found.levels.items())
    slowness = tuple(1 / worker.speed for worker in workers) if {w.speed for w in workers} != {1.0} else ()
    memory = tuple(limits) if any(limit is not None for limit in limits) else ()
    ways = Levels(count, levels, links) if levels else links
    uplinks = {at: _read(where, "uplink", w.uplink) / 1e3 for at, w in enumerate(workers) if w.uplink}
    return Machines(count, slowness, memory, _link(where, found.link), ways, uplinks)


def _link(where: str, way: _Direction) -> Link:
    return Link(way.latency_ms, _read(where, "bandwidth", way.bandwidth) / 1e3 if way.bandwidth else float("inf"))


def _read(where: str, name: str, said: str) -> float:
    try:
        return some(said)
    except ArgumentTypeError as error:
        raise ConfigError(f"{where}: {name} {error}") from None
