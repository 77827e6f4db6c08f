"""Predicted step times of an elastic job in other shapes, from the times of its last steps. Loads without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from ..dependency import Action, B, F, I, Kind, Spec, W
from ..model.cut import cut
from .footprint import Size
from .pricing import PricedSchedule
from .profile import TIMED, Chain, LayerCost, Machines
from .simulator import Link

#: part of the largest payload below which the time of a payload is latency alone
_SMALL = 1 / 16

#: by step: its number, its actions with start and end, and its arrivals with the sender, bytes and time; in ns
Steps = Sequence[tuple[int, Sequence[tuple[str, int, int]], Sequence[tuple[str, int, int, int]]]]


def predicted_ms(
    steps: Mapping[int, Steps], gradients: Mapping[int, float], blocks: Sequence[int], shapes: Sequence[Spec]
) -> list[float]:
    """Return the time of a step in each of the shapes, with an even cut; [] if a stage has not been measured.

    Args:
        steps: the last steps of each worker.
        gradients, blocks: their bytes, and how many there are, by stage of these steps.
    """
    slices = shapes[0].num_microbatches // shapes[0].num_whole
    found: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    ends: dict[tuple[int, int, str], int] = {}
    for worker, own in steps.items():
        for step, actions, _ in own:
            for text, begin, end in actions:
                (stage, kind, _), ends[step, worker, text] = Action.parse(text), end
                found[stage, kind].append((end - begin) / 1e6 * (slices if kind.per_microbatch else 1))
    if any((stage, F) not in found for stage in range(len(blocks))):
        return []
    arrivals = [(step, *each) for own in steps.values() for step, _, here in own for each in here]
    moved = [(size, (at - ends.get((step, peer, text), at)) / 1e6) for step, text, peer, size, at in arrivals]
    payload = median([size for _, text, _, size, _ in arrivals if Action.parse(text).kind is F] or [0])
    costs = []
    for stage, count in enumerate(blocks):
        times = {kind: median(found.get((stage, kind), [0.0])) / count for kind in TIMED}
        times[B] = times[B] or times[I] + times[W]
        held = gradients[stage] / count
        costs += [LayerCost(times, Size(weights=held, gradients=held, inputs=payload, outputs=payload))] * count
    model, link = Chain(costs), _link([each for each in moved if each[1] > 0])
    return [_step_ms(shape, model, link) for shape in shapes]


def _link(moved: Sequence[tuple[float, float]]) -> Link:
    """Return the link that fits the measured pairs of a payload's bytes and milliseconds."""
    small = _SMALL * max((size for size, _ in moved), default=0)
    large = [each for each in moved if each[0] > small]
    latency = median([ms for size, ms in moved if size <= small] or [ms for _, ms in large] or [0.0])
    rates = [size / (ms - latency) for size, ms in large if ms > latency]
    return Link(latency, median(rates) if len(large) < len(moved) and rates else float("inf"))


def _step_ms(spec: Spec, model: Chain, link: Link) -> float:
    uplinks = dict.fromkeys(range(spec.num_workers), link.bandwidth)  # a worker sends one payload after the other
    priced = PricedSchedule(spec, model, Machines(spec.num_workers, link=link, uplinks=uplinks))
    ends = model.ends([*map(len, cut(model.num_blocks, spec.num_stages))])
    return priced.step_time(priced.simulate(ends), ends)
