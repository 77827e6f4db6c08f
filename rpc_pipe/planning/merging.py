"""What several workers measured of one model at once, as one profile. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ..dependency import B, F
from .profile import LayerCost, Profile
from .simulator import Link

#: workers count as equal if the slowest takes less than so many times as long as the fastest: less is noise
_ALIKE = 1.1
#: and so does it if it takes less for more than one of so many blocks
_FEW = 5
#: a link is told apart from the others if its payloads take more than so many times as long, or less
_SAME_LINK = 1.5
#: bytes of a payload by which links are compared
_USUAL = 1e5


def merged(profiles: Sequence[Profile], links: Mapping[tuple[int, int], Link]) -> Profile:
    """Return the median of what was measured, of a worker as fast as the fastest, with what the workers are.

    Args:
        profiles: by worker, of the same blocks.
        links: by (from, to).
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
    topology = {"workers": [{"speed": round(1 / s, 3)} for s in slow], **_told(links)}
    return replace(first, measured=measured, per_stage=per_stage, workers=len(profiles), topology=topology)


def _slowness(profiles: Sequence[Profile]) -> list[float]:
    """Return how many times as long each worker takes as the fastest: 1 for all, if they differ by noise alone.

    A slower worker is slower at nearly every block. One that was disturbed is slower at some.
    """
    blocks = [
        [cost.times[F] + cost.times[B] for costs in profile.measured.values() for cost in costs] for profile in profiles
    ]
    totals = [sum(took) for took in blocks]
    fastest, slowest = blocks[totals.index(min(totals))], blocks[totals.index(max(totals))]
    ratios = sorted(b / a for a, b in zip(fastest, slowest, strict=True) if a)
    if not ratios or sum(slowest) < _ALIKE * sum(fastest) or ratios[len(ratios) // _FEW] < _ALIKE:
        return [1.0] * len(totals)
    return [total / sum(fastest) for total in totals]


def _median(costs: Sequence[LayerCost], slow: Sequence[float]) -> LayerCost:
    times = {kind: median(c.times[kind] / s for c, s in zip(costs, slow, strict=True)) for kind in costs[0].times}
    return replace(costs[0], times=times)


def _told(links: Mapping[tuple[int, int], Link]) -> dict[str, Any]:
    """Return links as in a file for --topology: the usual one, and those that differ."""
    if not links:
        return {}
    usual = Link(median(x.latency for x in links.values()), median(x.bandwidth for x in links.values()))

    def takes(link: Link) -> float:
        return link.latency + _USUAL / link.bandwidth

    others = {
        f"{a}-{b}": _plain(link)
        for (a, b), link in links.items()
        if not 1 / _SAME_LINK <= takes(link) / takes(usual) <= _SAME_LINK
    }
    return {"link": _plain(usual), **({"links": others} if others else {})}


def _plain(link: Link) -> dict[str, Any]:
    return {"latency_ms": round(link.latency, 4), "bandwidth": f"{link.bandwidth / 1e3:.4g}MB"}
