"""Versions of weights in an asynchronous stream, where forwards overtake updates: consequences of `Spec.version`.

The schedule declares which version a forward uses, so timing cannot change it: F(s,m) needs the update that makes
version(s,m), and uses that version even if later ones exist; so does its backward. The trained weights do not depend on
timing.

    F(s,m) <- the update of s that makes version(s,m)
    U(s,j) <- every B(s,.) or W(s,.) with gradients that it takes, U(s,j-1); with replicas, the sums of all

Microbatches and updates are counted through the stream. A stage has one update a step for each route, or one after
every microbatch (`Spec.update_every`), with replicas one after a microbatch of each.
"""

from collections.abc import Iterator
from itertools import count

from .action import Action, U, join_route, join_step, split_route, split_step
from .declared import Declared
from .reductions import Reductions, on_route, routes_of


def updates_a_step(spec: Declared) -> int:
    """Return the number of updates of a stage in a step, on all routes together."""
    return spec.num_rounds * spec.num_routes


def step_of(spec: Declared, action: Action) -> int:
    """Return the step of a stream that an action is of; -1: it is of several."""
    if not action.kind.per_microbatch and action.kind is not U:
        return -1
    a_step = spec.num_microbatches if action.kind.per_microbatch else updates_a_step(spec)
    return split_step(action.index, a_step)[0]


def updates_before(spec: Declared, microbatch: int) -> int:
    """Return the number of updates of a stage, on one route, before the update that takes a microbatch's gradients."""
    step, at = split_step(microbatch, spec.num_microbatches)
    return join_step(step, split_step(at, spec.round_size)[0], spec.num_rounds)


def known_reductions(spec: Declared, reductions: Reductions) -> Reductions:
    """Return the part of `reductions` that can be known before updates of `spec`.

    An update that does not take a whole step knows its weight, and waits for no other stage: that would empty the pipe.
    """
    return reductions if spec.takes_steps else Reductions(buckets=reductions.buckets)


def update_of(spec: Declared, stage: int, microbatch: int) -> Action:
    """Return the update that takes the gradients of a microbatch."""
    return U(stage, join_route(updates_before(spec, microbatch), spec.route(microbatch), spec.num_routes))


def summed_update(spec: Declared, microbatch: int) -> Action:
    """Return the update of the first stage and replica that takes the gradients of a microbatch, as all replicas do."""
    update = update_of(spec, 0, microbatch)
    number, route = split_route(update.index, spec.num_routes)
    return update._replace(index=join_route(number, spec.alike(route)[0], spec.num_routes))


def microbatches_of(spec: Declared, update: Action) -> list[int]:
    """Return the microbatches with gradients that an update takes."""
    number, route = split_route(update.index, spec.num_routes)
    step, number = split_step(number, spec.num_rounds)
    begin = number * spec.round_size
    size = min(spec.round_size, spec.num_microbatches - begin)
    first = join_step(step, begin, spec.num_microbatches)
    return [first + at for at in range(size) if spec.num_routes == 1 or routes_of(spec)(begin + at) == route]


def update_before(spec: Declared, update: Action) -> Action | None:
    """Return the update before on the same replica of a stage, which pipelines make in turn; None: it is the first."""
    separate = spec.num_separate
    index = update.index - (1 if update.index % separate else spec.num_routes - separate + 1)
    return update._replace(index=index) if index >= 0 else None


def microbatches_on(spec: Declared, route: int) -> Iterator[int]:
    """Yield the microbatches of a stream that take a route; it never ends, unless there are none."""
    own = [*on_route(spec, range(spec.num_microbatches), route)]
    return (step * spec.num_microbatches + m for step in count() for m in own) if own else iter(())


def before_forward(spec: Declared, forward: Action) -> Iterator[Action]:
    """Yield the update that makes the version that a forward uses."""
    stage, _, m = forward
    version = spec.version(stage, m)
    if version > 0:
        route = spec.route(m) if spec.num_routes > 1 else 0
        yield U(stage, join_route(version - 1, route, spec.num_routes))


def before_update(spec: Declared, update: Action) -> Iterator[Action]:
    """Yield the actions that add to the gradients of an update, and the update before it."""
    for m in microbatches_of(spec, update):
        yield from (action for action in spec.actions(update.stage, m) if action.kind.accumulates)
    if (before := update_before(spec, update)) is not None:
        yield before
