"""One profile from those that several workers measured of one model at once. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ...dependency import B, F
from ..profile import LayerCost, Profile
from ..simulator import Link

#: workers whose times differ by a smaller factor count as equally fast: such differences are noise
_NOISE = 1.1
#: a worker counts as slower only if at most one in this many blocks is not slower
_SLOW_SHARE = 5
#: links whose times differ by a smaller factor count as equal
_SAME_LINK = 1.5
#: bytes of the payload by whose time links are compared
_PAYLOAD_BYTES = 1e5


def merged(profiles: Sequence[Profile], links: Mapping[tuple[int, int], Link]) -> Profile:
    """Return the median costs, scaled to the fastest worker, with the speeds of workers and their links.

    Args:
        profiles: by worker, of the same blocks.
        links: by (source, target).
    """
    slow = _slowness(profiles)
    first = profiles[0]
    measured = {
        rows: [_median([p.measured[rows][i] for p in profiles], slow) for i in range(first.num_blocks)]
        for rows in first.measured
    }
    per_stage = {
        kind: median(p.per_stage[kind] / s for p, s in zip(profiles, slow, strict=True)) for kind in first.per_stage
    }
    topology = {"workers": [{"speed": round(1 / s, 3)} for s in slow], **_links_as_json(links)}
    return replace(first, measured=measured, per_stage=per_stage, workers=len(profiles), topology=topology)


def _slowness(profiles: Sequence[Profile]) -> list[float]:
    """Return the ratios of the workers' times to those of the fastest; 1 for all if the differences are noise.

    A slower worker is slower at nearly every block; one that was disturbed is slower at some of them.
    """
    blocks = [
        [cost.times[F] + cost.times[B] for costs in profile.measured.values() for cost in costs] for profile in profiles
    ]
    totals = [sum(took) for took in blocks]
    fastest, slowest = blocks[totals.index(min(totals))], blocks[totals.index(max(totals))]
    ratios = sorted(b / a for a, b in zip(fastest, slowest, strict=True) if a)
    if not ratios or sum(slowest) < _NOISE * sum(fastest) or ratios[len(ratios) // _SLOW_SHARE] < _NOISE:
        return [1.0] * len(totals)
    return [total / sum(fastest) for total in totals]


def _median(costs: Sequence[LayerCost], slow: Sequence[float]) -> LayerCost:
    times = {kind: median(c.times[kind] / s for c, s in zip(costs, slow, strict=True)) for kind in costs[0].times}
    return replace(costs[0], times=times)


def _links_as_json(links: Mapping[tuple[int, int], Link]) -> dict[str, Any]:
    """Return links as in a file for --topology: the median link, and those that differ from it."""
    if not links:
        return {}
    usual = Link(median(x.latency for x in links.values()), median(x.bandwidth for x in links.values()))

    def takes(link: Link) -> float:
        return link.latency + _PAYLOAD_BYTES / link.bandwidth

    others = {
        f"{a}-{b}": _link_as_json(link)
        for (a, b), link in links.items()
        if not 1 / _SAME_LINK <= takes(link) / takes(usual) <= _SAME_LINK
    }
    return {"link": _link_as_json(usual), **({"links": others} if others else {})}


def _link_as_json(link: Link) -> dict[str, Any]:
    return {"latency_ms": round(link.latency, 4), "bandwidth": f"{round(link.bandwidth / 1e3, 3):.12g}MB"}
