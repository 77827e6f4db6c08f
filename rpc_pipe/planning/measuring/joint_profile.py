"""A model profiled by all workers of a job at once: all are busy together, as in a pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ...dependency import B, F, G, Kind
from ...launching.job import current_job
from ...model.user_model import UserModel
from ...tracing import run_folders
from ...workers.compute.devices.backends import backend_for
from ..profile import LayerCost, Profile
from ..profile_file import as_json, from_json
from ..simulator import Link
from .calibration import calibrate
from .profiling import RUNTIME_MS, profile_model

#: smaller factors between the times of workers are noise: the workers count as equally fast
_NOISE = 1.1
#: a worker counts as slower only if at most one in this many blocks is not slower
_SLOW_SHARE = 5
#: smaller factors between the times of links are noise: the links count as equal
_SAME_LINK = 1.5
#: bytes of the payload that compares links by its time
_PAYLOAD_BYTES = 1e5


def profile_together(
    user_model: UserModel, rows: Sequence[int], num_workers: int, settings: Mapping[str, Any]
) -> tuple[Profile, int]:
    """Return the measurements of all workers of this job, and this worker's number; all make the same call.

    Args:
        user_model: the same on all workers.
        settings: keyword arguments of `profile_model`.

    Raises:
        ConfigError: as of `profile_model`.
    """
    os.environ[run_folders.FOLDER] = run_folders.OFF  # layers that sleep need no display
    actor, found = calibrate(num_workers)
    actor.exchange("all are there", None)
    job = current_job()
    backend_for(settings.get("device", "cpu"), job.place if job else actor.worker).use()  # `cuda`: another GPU for each

    def barrier() -> None:
        actor.exchange("updates are measured", None)

    own = profile_model(user_model, rows, at_least=num_workers, barrier=barrier, **settings)
    told = actor.exchange("profiles", json.dumps(as_json(own)))
    profiles = [from_json(json.loads(each), "the profile of a worker") for each in told]
    profile = merged(profiles, found.links)
    on_host = own.device == "cpu"  # a GPU runs behind its worker, which hides the worker's time
    profile = with_moves(profile, found.per_byte if on_host else 0.0)
    per_stage = around(profile.per_stage, found.per_action if on_host else {})
    per_step, per_mib = (max(0.0, found.per_step), found.per_mib) if on_host else (0.0, 0.0)
    return replace(profile, per_stage=per_stage, per_step=per_step, per_mib=per_mib), actor.worker


def with_moves(profile: Profile, per_byte: float) -> Profile:
    """Return a profile with the compute time that replicas lose while gradients move."""

    def moved(cost: LayerCost) -> LayerCost:
        return replace(cost, times={**cost.times, G: cost.times[G] + per_byte * cost.size.gradients})

    return replace(profile, measured={rows: [*map(moved, costs)] for rows, costs in profile.measured.items()})


def around(assumed: Mapping[Kind, float], found: Mapping[Kind, float]) -> dict[Kind, float]:
    """Return the time of each stage besides its blocks, ms, with the runtime's measured time for the assumed one."""
    # Not below 0: the assumed time has been divided by the speed of a worker that was slow meanwhile.
    return {**assumed, **{kind: max(0.0, assumed.get(kind, RUNTIME_MS) - RUNTIME_MS + found[kind]) for kind in found}}


def merged(profiles: Sequence[Profile], links: Mapping[tuple[int, int], Link]) -> Profile:
    """Return the median costs, scaled to the fastest worker, with the speeds of workers and their links.

    Args:
        profiles: by worker, of the same blocks.
        links: by (source, target).
    """
    slow = _slowness(profiles)
    first = profiles[0]

    def middle(times: Sequence[Mapping[Kind, float]]) -> dict[Kind, float]:
        return {kind: median(each[kind] / s for each, s in zip(times, slow, strict=True)) for kind in times[0]}

    measured = {
        rows: [
            replace(costs[0], times=middle([cost.times for cost in costs]))
            for costs in zip(*(profile.measured[rows] for profile in profiles), strict=True)
        ]
        for rows in first.measured
    }
    topology = {"workers": [{"speed": round(1 / s, 3)} for s in slow], **_links_as_json(links)}
    per_stage, scatter = middle([p.per_stage for p in profiles]), median(p.scatter for p in profiles)
    about: Any = {"workers": len(profiles), "topology": topology, "scatter": scatter}
    return replace(first, measured=measured, per_stage=per_stage, **about)


def _slowness(profiles: Sequence[Profile]) -> list[float]:
    """Return the ratios of the workers' times to the fastest worker's; 1 for all if the differences are noise.

    A slower worker is slower at nearly every block; one that was disturbed is slower at some of them.
    """
    every = ([cost for costs in profile.measured.values() for cost in costs] for profile in profiles)
    blocks = [[cost.times[F] + cost.times[B] for cost in costs] for costs in every]
    totals = [sum(took) for took in blocks]
    fastest, slowest = blocks[totals.index(min(totals))], blocks[totals.index(max(totals))]
    ratios = sorted(b / a for a, b in zip(fastest, slowest, strict=True) if a)
    if not ratios or sum(slowest) < _NOISE * sum(fastest) or ratios[len(ratios) // _SLOW_SHARE] < _NOISE:
        return [1.0] * len(totals)
    return [total / sum(fastest) for total in totals]


def _links_as_json(links: Mapping[tuple[int, int], Link]) -> dict[str, Any]:
    """Return links as in a file for --topology: the median link, and each link that differs from it."""
    if not links:
        return {}
    usual = Link(median(x.latency for x in links.values()), median(x.bandwidth for x in links.values()))

    def takes(link: Link) -> float:
        return link.latency + _PAYLOAD_BYTES / link.bandwidth

    differ = {
        ends: link for ends, link in links.items() if not 1 / _SAME_LINK <= takes(link) / takes(usual) <= _SAME_LINK
    }
    others = {f"{a}-{b}": _link_as_json(link) for (a, b), link in differ.items()}
    return {"link": _link_as_json(usual), **({"links": others} if others else {})}


def _link_as_json(link: Link) -> dict[str, Any]:
    return {"latency_ms": round(link.latency, 4), "bandwidth": f"{round(link.bandwidth / 1e3, 3):.12g}MB"}
