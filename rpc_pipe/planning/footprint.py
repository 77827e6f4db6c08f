"""Memory in bytes: what each worker of a simulated step holds at its fullest moment. Loads without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate

from ..dependency import Action, B, F, G, I, R, Spec, U, W, weight_copies
from .simulator import Simulation


@dataclass(frozen=True)
class Size:
    """Bytes of one stage: of its shard, and for one microbatch."""

    #: parameters and buffers
    weights: float = 0
    #: gradients of the parameters, all step long
    gradients: float = 0
    #: what the optimizer keeps
    optimizer: float = 0
    #: what forward saves for backward, the inputs included
    activations: float = 0
    #: what is kept from I to W: of products their inputs and the gradients of their outputs, in all often as much
    after_inputs: float = 0
    #: what arrives from the stage before, and the gradient that goes back
    inputs: float = 0
    #: what goes to the next stage, and the gradient that comes back
    outputs: float = 0
    #: what an action needs while it runs, besides all that: of the action that needs most
    working: float = 0
    #: the part of activations that is stored where the inputs are, and where the outputs are
    kept_inputs: float = 0
    kept_outputs: float = 0

    @property
    def shard(self) -> float:
        """Bytes that are there all the time."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: Size) -> Size:
        """Put another stage behind this one: the same microbatch passes both. What both keep is there once."""
        summed = Size(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(
            summed,
            activations=summed.activations - self.joint(other),
            inputs=self.inputs,
            outputs=other.outputs,
            working=max(self.working, other.working),
            kept_inputs=self.kept_inputs,
            kept_outputs=other.kept_outputs,
        )

    def joint(self, behind: Size) -> float:
        """Return the bytes that this one and the one behind it would both keep: of what goes from one to the other."""
        return min(self.kept_outputs, behind.kept_inputs)


def peak_bytes(simulation: Simulation, sizes: Sequence[Size]) -> tuple[float, ...]:
    """Return, by worker, the most bytes that it holds in a step.

    Counted are shards, activations (kept inputs where they are recomputed), outboxes until the consumer has the
    payload, and what has arrived and is not used yet; and while an action runs what the one of its stage needs that
    needs most.

    Args:
        simulation: of one step.
        sizes: by stage.
    """
    spec = simulation.spec
    changes: list[dict[tuple[float, int], float]] = [defaultdict(float) for _ in range(spec.num_workers)]
    span_of = {span.action: span for span in simulation.spans}
    arrival = {(action, target): when for action, _, target, when in simulation.carried}

    def add(worker: int, time: float, amount: float) -> None:
        changes[worker][time, 0 if amount < 0 else 1] += amount  # at equal times what is freed goes first

    for span in simulation.spans:
        worker, action = span.worker, span.action
        size = sizes[action.stage]
        if action.kind.per_microbatch:
            working = _working(spec, action, size)
            add(worker, span.start, working)
            add(worker, span.end, -working)
        if action.kind is F:
            add(worker, span.start, size.inputs if spec.recomputes(action.stage) else size.activations)
        elif action.kind is R:
            add(worker, span.start, size.activations - size.inputs)
        elif action.kind is I:
            add(worker, span.end, size.after_inputs - size.activations)
        elif action.kind in (B, W):
            add(worker, span.end, -(size.activations if action.kind is B else size.after_inputs))
        amount = payload_bytes(action, size)
        kept = 0 if action.kind is not F or spec.recomputes(action.stage) else min(amount, size.kept_outputs)
        for user in spec.successors(action):
            at = spec.worker(user)
            there = arrival.get((action, at), span.end)
            if at != worker:
                add(worker, span.end, amount - kept)
                add(worker, there, kept - amount)
            used = span_of[user]
            new = amount if at != worker else amount - kept
            add(at, there, new)
            # What a forward takes in it counts as its activations; a gradient is there until backward has ended.
            add(at, used.start if user.kind is F else used.end, -new)
    peaks, weights = [], weight_bytes(spec, sizes)
    for worker, change in enumerate(changes):
        resident = sum(sizes[stage].shard - sizes[stage].weights for stage, _ in spec.hosted(worker)) + weights[worker]
        peaks.append(resident + max([0, *accumulate(change[key] for key in sorted(change))]))
    return tuple(peaks)


def _working(spec: Spec, action: Action, size: Size) -> float:
    """Return what an action needs while it runs.

    W of the first stage runs the whole backward at once: all gradients are there before they are added to others.
    """
    return max(size.working, size.gradients) if action.kind is W and not action.stage else size.working


def weight_bytes(spec: Spec, sizes: Sequence[Size]) -> list[float]:
    """Return, by worker, the bytes of all copies of weights that it holds: of replicas, versions and a reference."""
    return [
        sum(
            (weight_copies(spec, stage) + (route == 0 and spec.elasticity > 0)) * sizes[stage].weights
            for stage, route in spec.hosted(worker)
        )
        for worker in range(spec.num_workers)
    ]


def payload_bytes(action: Action, size: Size) -> float:
    """Return the bytes of what an action on a stage of this size makes for other stages."""
    if action.kind is F:
        return size.outputs
    if action.kind is G:
        return size.gradients
    return size.inputs if action.kind in (B, I) else 0


def num_messages(simulation: Simulation) -> int:
    """Return how many payloads travel between workers in a step."""
    spec = simulation.spec
    return sum(
        len({spec.worker(user) for user in spec.successors(action)} - {worker})
        for worker, action, _, _ in simulation.spans
        if action.kind not in (R, W, U)
    )
