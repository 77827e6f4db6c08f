"""The file format of `plan --topology`: memory and speed of each worker, and the links between them.

    {"workers": [{"memory": "8GB", "speed": 1.0}, {"memory": "4GB", "speed": 0.5}],
     "link": {"latency_ms": 0.2, "bandwidth": "1GB"},
     "links": {"0-1": {"latency_ms": 5, "bandwidth": "100MB"}}}

Bandwidths are bytes a second. A link is told once for both ways, or `1-0` beside `0-1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..dependency.files import read_json
from ..planning.profile import Machines
from ..planning.simulator import Link
from .options import parse_bytes, parse_number, parse_worker

#: measured link between processes of one machine, through shared memory
HERE = Link(0.3, 1e6)


def parse_link(text: str) -> Link:
    """Read the link of --link.

    >>> parse_link("0.5/1GB")
    Link(latency=0.5, bandwidth=1000000.0)
    """
    latency, slash, bandwidth = text.partition("/")
    width = parse_bytes(f"--link {latency}/", bandwidth) / 1e3 if slash else float("inf")
    if width == 0:
        raise ConfigError(f"--link {text}: a bandwidth must be above 0")
    return Link(parse_number("--link", latency), width)


def parse_memory(option: str, text: str) -> float:
    """Read the bytes that a worker may use.

    Raises:
        ConfigError: it is no number, or 0, in which nothing fits.
    """
    limit = parse_bytes(option, text)
    if not limit:
        raise ConfigError(f"{option} {text}: must be above 0")
    return limit


def read_topology(path: str) -> Machines:
    """Read the machines from a file.

    Raises:
        ConfigError: the file cannot be read, or says something that cannot be.
    """
    where = f"--topology {path}"
    return machines_of(where, read_json(Path(path), where))


def machines_of(where: str, told: Any) -> Machines:
    """Return the machines from the contents of such a file, or of a profile.

    Raises:
        ConfigError: it says something that cannot be.
    """
    if not isinstance(told, Mapping) or not isinstance(told.get("workers"), list) or not told["workers"]:
        raise ConfigError(f'{where}: must have "workers", a list such as [{{"memory": "8GB", "speed": 1.0}}]')
    _refuse_unknown(where, told, ("workers", "link", "links"))
    speeds, memory = [], []
    for worker in told["workers"]:
        if not isinstance(worker, Mapping):
            raise ConfigError(f'{where}: worker {worker!r}: must be such as {{"memory": "8GB", "speed": 1.0}}')
        _refuse_unknown(where, worker, ("memory", "speed"))
        speed = _number(where, "speed", worker.get("speed", 1.0))
        if speed <= 0:
            raise ConfigError(f"{where}: speed {speed:g}: must be above 0")
        speeds.append(speed)
        memory.append(parse_memory(f"{where}: memory", str(worker["memory"])) if "memory" in worker else None)
    count = len(speeds)
    links = {}
    given = told.get("links", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f'{where}: links {given!r}: must be such as {{"0-1": {{"latency_ms": 5}}}}')
    for ends, link in given.items():
        source, dash, target = ends.partition("-")
        if not dash:
            raise ConfigError(f"{where}: link {ends!r}: must be FROM-TO, such as 0-1")
        a, b = parse_worker(where, source, count), parse_worker(where, target, count)
        if a == b:
            raise ConfigError(f"{where}: link {a}-{b}: is between two workers")
        links[a, b] = read_link(where, link)
        if f"{b}-{a}" not in given:
            links[b, a] = links[a, b]
    return Machines(
        count,
        tuple(1 / speed for speed in speeds) if set(speeds) != {1.0} else (),
        tuple(memory) if any(limit is not None for limit in memory) else (),
        read_link(where, told["link"]) if "link" in told else HERE,
        links,
    )


def read_link(where: str, told: Any) -> Link:
    """Read one link."""
    if not isinstance(told, Mapping):
        raise ConfigError(f'{where}: link {told!r}: must be such as {{"latency_ms": 0.2, "bandwidth": "1GB"}}')
    _refuse_unknown(where, told, ("latency_ms", "bandwidth"))
    bandwidth = float("inf")
    if "bandwidth" in told:
        bandwidth = parse_bytes(f"{where}: bandwidth", str(told["bandwidth"])) / 1e3
        if bandwidth <= 0:
            raise ConfigError(f"{where}: bandwidth {told['bandwidth']}: must be above 0")
    latency = _number(where, "latency_ms", told.get("latency_ms", 0))
    return Link(latency, bandwidth)


def _number(where: str, name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1e100:
        raise ConfigError(f"{where}: {name} {value!r}: must be a number from 0 to 1e+100")
    return float(value)


def _refuse_unknown(where: str, told: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in told:
        if key not in known:
            raise ConfigError(f"{where}: {key!r}: known are {', '.join(known)}")
