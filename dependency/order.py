"""The order of a worker's actions, computed without other workers.

The order comes from the first of these that the spec defines: `slot` (sorted), `program` (as listed), or the unrolled
relation (`unroll.py`, a global pass).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter

from .action import A, Action, G, P, S, U, W, split_route
from .errors import ScheduleError
from .reductions import NO_REDUCTIONS, Reductions, reduction_tree, routes_of
from .spec import Spec, overrides


def has_slot(spec: Spec) -> bool:
    """Return whether the order of `spec` is a closed form, so that every worker can check it alone."""
    return overrides(type(spec), "slot")


def has_program(spec: Spec) -> bool:
    """Return whether `spec` lists each worker's actions itself."""
    return overrides(type(spec), "program")


def is_uniform(spec: Spec) -> bool:
    """Return whether a stage runs the same kinds of actions for every microbatch."""
    return not (overrides(type(spec), "splits") or overrides(type(spec), "actions"))


def local_order(spec: Spec, worker: int, reductions: Reductions = NO_REDUCTIONS) -> Iterator[Action]:
    """Yield the actions of `worker` in its order, with the end of a synchronous step.

    Costs O(n log n) for n actions of the worker.

    Raises:
        ScheduleError: two actions of the worker share a slot.
    """
    if has_slot(spec):
        order = _by_slot(spec, worker)
    elif has_program(spec):
        order = iter(spec.program(worker))
    else:
        order = iter(_unrolled(spec)[worker])
    complete = with_end if spec.synchronous else _with_reductions
    return complete(spec, worker, order, reductions)


@lru_cache(maxsize=16)
def routes(spec: Spec, forward_only: bool = False) -> Callable[[int], int]:
    """Return a function that gives the route of a microbatch.

    Args:
        forward_only: whether this is an evaluation. If pipelines are pulled to a common reference, the reference is
            evaluated on the shards of the first pipeline, because each pipeline has separate buffers.
    """
    if spec.num_routes == 1:
        return lambda microbatch: 0
    route_of = routes_of(spec)
    if not (forward_only and spec.averaging_pull):
        return route_of
    return lambda microbatch: route_of(microbatch) - route_of(microbatch) % spec.num_separate


@lru_cache(maxsize=4)
def _unrolled(spec: Spec) -> list[list[Action]]:
    """Return all workers' orders: a global pass; each worker in this process uses a part of it."""
    from .unroll import unroll  # few schedules have neither slots nor a program

    return unroll(spec)


def _by_slot(spec: Spec, worker: int) -> Iterator[Action]:
    slot = spec.slot
    slotted = sorted([(slot(action), action) for action in spec.own_actions(worker)], key=itemgetter(0))
    for (before, first), (at, second) in pairwise(slotted):
        if at == before:
            own = ", and W is an action of its own where backward is split" * (W in (first.kind, second.kind))
            raise ScheduleError(f"slot: {first} and {second} of worker {worker} share slot {at}; they must differ{own}")
    yield from (action for _, action in slotted)


def with_end(spec: Spec, worker: int, order: Iterable[Action], reductions: Reductions) -> Iterator[Action]:
    """Insert the actions that end a step right behind their needs: the end of a step is no barrier.

    An update that waits for no other stage follows its last gradient, and so does an exchange of gradients. Updates
    that wait for other stages come last.
    """
    tree = reduction_tree(spec, reductions)
    awaits = reductions.weight or (reductions.norms and not reductions.validated)
    route_of, order = routes(spec), [*order]
    left = Counter((a.stage, route_of(a.index)) for a in order if a.kind.accumulates)
    hands = {last: hand for last, hand, _ in spec.handovers}
    ended = [shard for shard in spec.hosted(worker) if not left[shard]]
    for shard in ended:  # a route without microbatches
        yield from tree.given(G, *shard)
    for action in order:
        yield action
        if action in hands:
            yield hands[action]
        elif action.kind.accumulates:
            shard = action.stage, route_of(action.index)
            left[shard] -= 1
            if left[shard] == 0:
                yield from tree.given(G, *shard)
                if tree.pieces(*shard) or awaits:
                    ended.append(shard)
                else:
                    yield from spec.updates(*shard)
    yield from (each for shard in spec.hosted(worker) for each in tree.given(S, *shard))
    yield from tree.actions(worker)
    yield from (update for shard in ended for update in spec.updates(*shard))
    if spec.parallelism.zero:
        yield from (given for shard in ended for given in tree.given(P, *shard))
        yield from (A(*shard) for shard in ended if tree.pieces(*shard))


def _with_reductions(spec: Spec, worker: int, order: Iterable[Action], reductions: Reductions) -> Iterator[Action]:
    """Insert the exchange of gradients before the updates of a stream, and the exchange of parameters behind them.

    The other actions that end its steps, which occupy no device, are appended. Updates stay in their slots."""
    tree, routes = reduction_tree(spec, reductions), spec.num_routes
    for action in order:
        stage, kind, index = action
        if kind is not U:
            yield action
            continue
        number, route = split_route(index, routes)
        replica = stage, route, number
        yield from (*tree.given(G, *replica), *tree.given(S, *replica), action)
        if spec.parallelism.zero:
            yield from (*tree.given(P, *replica), A(stage, index))
    yield from tree.actions(worker)
