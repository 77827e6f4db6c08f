"""The peak memory of each worker of a simulated step, in bytes. Loads without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate

from ..dependency import Action, B, F, G, I, Kind, P, R, S, Spec, W
from ..dependency.action import BUILT_IN
from ..dependency.earlier_steps import held_copies
from ..dependency.memory import loaded
from .simulator import Simulation
from .span import Span


@dataclass(frozen=True)
class Size:
    """Bytes of one block or stage: of its parameters, and for one microbatch."""

    #: parameters and buffers
    weights: float = 0
    #: gradients of the parameters, kept all step long
    gradients: float = 0
    #: optimizer state
    optimizer: float = 0
    #: bytes that F keeps for the backward, inputs included
    activations: float = 0
    #: bytes kept from I to W: for matrix products the inputs and the outputs' gradients, often the same amount in all
    after_inputs: float = 0
    #: the payload from the stage before, and the gradient that goes back
    inputs: float = 0
    #: the payload to the next stage, and the gradient that comes back
    outputs: float = 0
    #: working memory of the most demanding action, while it runs
    working: float = 0
    #: the parts of activations that share memory with the inputs and with the outputs
    kept_inputs: float = 0
    kept_outputs: float = 0
    #: gradients of parameters that several blocks of a stage share, once for each use but the first
    tied: float = 0
    #: the part of activations that a slice of a sequence leaves for later ones, such as keys and values
    state: float = 0
    #: weights that other members of the worker hold
    elsewhere: float = 0
    #: gradients for other members, kept until the members add them up, and gathered weights that are kept
    unsummed: float = 0

    @property
    def shard(self) -> float:
        """Bytes that a worker holds all the time."""
        return self.weights + self.gradients + self.unsummed + self.optimizer

    def __add__(self, other: Size) -> Size:
        """Return the size of a stage of this block and `other` behind it. Tensors that both keep are stored once."""
        summed = Size(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        own = {"inputs": self.inputs, "kept_inputs": self.kept_inputs, "working": max(self.working, other.working)}
        own |= {"outputs": other.outputs, "kept_outputs": other.kept_outputs}
        return replace(summed, activations=summed.activations - self.joint(other), **own)

    def joint(self, behind: Size) -> float:
        """Return the bytes between this block and the next that both keep."""
        return min(self.kept_outputs, behind.kept_inputs)


def peak_bytes(simulation: Simulation, sizes: Sequence[Size]) -> tuple[float, ...]:
    """Return the peak bytes of each worker in a step.

    Counted are shards; activations, or inputs where a stage recomputes; payloads in outboxes until the consumer has
    them; payloads that have arrived and are not used yet; and `Size.working` while an action runs.

    Args:
        simulation: of one step.
        sizes: by stage.
    """
    spec, relation, weights = simulation.spec, simulation.relation, weight_bytes(simulation.spec, sizes)
    for stage, route in loaded(spec, (span.action for span in simulation.spans)):
        weights[spec.place(stage, route)] -= sizes[stage].weights
    changes: list[dict[tuple[float, int], float]] = [defaultdict(float) for _ in range(spec.num_workers)]
    span_of = {span.action: span for span in simulation.spans}
    arrival = {(action, target): when for action, _, target, when in simulation.transfers}

    def add(worker: int, time: float, amount: float) -> None:
        changes[worker][time, 0 if amount < 0 else 1] += amount  # at equal times memory is freed before it is allocated

    for span in simulation.spans:
        worker, action = span.worker, span.action
        size = of_share(sizes[action.stage], relation.portion(action))
        moved = size if action.kind in BUILT_IN else of_share(sizes[spec.moved(action)], relation.portion(action))
        if action.kind.per_microbatch:
            working = _working(action, size)
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
        elif way := action.kind.holds:
            add(worker, span.start if way > 0 else span.end, way * moved_bytes(action.kind, moved))
        if action.kind.per_microbatch and spec.extent(action) != (0, 1):
            _add_state(add, span, sizes[action.stage].state, spec.extent(action), relation.portion(action))
        amount = payload_bytes(action, moved, relation.gradient_parts(action.stage))
        kept = 0 if action.kind is not F or spec.recomputes(action.stage) else min(amount, size.kept_outputs)
        for user in spec.successors(action, relation.reductions):
            at = spec.worker(user)
            there = arrival.get((action, at), span.end)
            if at != worker:
                add(worker, span.end, amount - kept)
                add(worker, there, kept - amount)
            used = span_of[user]
            new = amount if at != worker else amount - kept
            add(at, there, new)
            # From its start a forward's input counts as activations; a gradient is held until the backward has ended.
            add(at, used.start if user.kind.holds > 0 else used.end, -new)
    held = [size.gradients + size.unsummed + size.optimizer * spec.state_share for size in sizes]
    resident = [sum(held[stage] for stage, _ in spec.hosted(worker)) for worker in range(spec.num_workers)]
    most = [max([0, *accumulate(change[key] for key in sorted(change))]) for change in changes]
    return tuple(map(sum, zip(resident, weights, most, strict=True)))


def of_share(size: Size, share: float) -> Size:
    """Return the bytes of a slice with this share of a microbatch's sequence; weights are the same for all slices."""
    if share == 1:
        return size
    counted = ("activations", "after_inputs", "inputs", "outputs", "kept_inputs", "kept_outputs", "working")
    part = replace(size, **{name: getattr(size, name) * share for name in counted})
    return replace(part, activations=part.activations - size.state * share)


def _add_state(
    add: Callable[[int, float, float], None], span: Span, state: float, extent: tuple[float, float], share: float
) -> None:
    """Add the state that the slices of a sequence leave on a stage, and its gradients.

    Each slice leaves its share of `state`. The last slice's backward, which is the first to run, adds the gradients;
    the first slice's backward frees all.
    """
    kind = span.action.kind
    if kind is F:
        add(span.worker, span.start, state * share)
    if extent[1] == 1 and kind in (B, I):
        add(span.worker, span.start, state)
    if extent[0] == 0 and kind in (B, W):
        add(span.worker, span.end, -2 * state)


def _working(action: Action, size: Size) -> float:
    """Return the working memory of an action.

    W of the first stage is a whole backward, which computes all gradients before it adds them to the kept sums; a
    tied parameter has a gradient for each use.
    """
    whole = action.kind is W and not action.stage
    return max(size.working, size.gradients + size.tied) if whole else size.working


def weight_bytes(spec: Spec, sizes: Sequence[Size]) -> list[float]:
    """Return each worker's bytes of weights: of all replicas and versions, and of an elastic average's reference."""
    hosted = [spec.hosted(worker) for worker in range(spec.num_workers)]
    return [sum(held_copies(spec, *each) * sizes[each[0]].weights for each in own) for own in hosted]


def moved_bytes(kind: Kind, size: Size) -> float:
    """Return the bytes that an action of a kind with `holds` moves; `size` is of the stage `Spec.moved`."""
    return size.weights if kind.moves == "weights" else size.activations


def copy_time(kind: Kind, size: Size, bandwidth: float) -> float:
    """Return the time of a copy by its bytes; 0 of another action."""
    return moved_bytes(kind, size) / bandwidth if kind.holds and kind.resource == "copy" else 0.0


def payload_bytes(action: Action, size: Size, num_parts: int = 1) -> float:
    """Return the bytes of an action's payload for other stages or routes.

    Args:
        size: of its stage.
        num_parts: in how many parts gradients are exchanged: a bucket or several for each route.
    """
    if action.kind in (G, S, P):
        return size.gradients / num_parts
    if action.kind in (F, B, I):
        return size.outputs if action.kind is F else size.inputs
    return moved_bytes(action.kind, size) if action.kind.holds < 0 else 0
