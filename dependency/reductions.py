"""The end of a step as actions: what must be known before an update, and how it reaches every worker.

    C, N  collect along a tree whose root is the last stage: the loss, its weight and requests to stop; gradients' norms
    D, T  distribute the results down the same tree: the step's loss and whether to continue; the norm of all gradients
    V     validates an update that was made before the norm of all gradients was known: it stands, or is made again

The tree has a node on every worker: it leads from the last stage back along one route until it has reached all workers
of that route, then along the next route. So all edges are between neighbouring stages, and a worker that holds several
stages receives each result once. An update waits only for what it needs: with a mean loss and without clipping it waits
for no other worker. The loss is known when the last forward has run. Norms exist only if an update needs them, and are
known when all backwards have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

from .action import Action
from .kinds import C, D, F, G, N, T, U, V

#: kind that distributes a result -> kind that collects it
_COLLECTED = {D: C, T: N}
#: a replica of a stage: (stage, route)
Replica = tuple[int, int]


class Placed(Protocol):
    """The part of a spec that this module uses."""

    @property
    def total_microbatches(self) -> int: ...
    @property
    def num_routes(self) -> int: ...
    @property
    def last_stage(self) -> int: ...
    def place(self, stage: int, route: int) -> int: ...
    def route(self, microbatch: int) -> int: ...
    def hosted(self, worker: int) -> list[Replica]: ...


def on_route(spec: Placed, microbatches: Iterable[int], route: int) -> Iterator[int]:
    """Return those microbatches that take a route."""
    return iter(microbatches) if spec.num_routes == 1 else (m for m in microbatches if spec.route(m) == route)


class Reductions(NamedTuple):
    """The reductions over all stages that the updates of a step depend on."""

    #: the weight of the whole step: the loss is given as sums
    weight: bool = False
    #: the norms of all gradients: they are clipped
    norms: bool = False
    #: whether an update does not wait for them, and is validated when they are known (Qi et al. 2023, section 4)
    validated: bool = False
    #: for each stage, all stages that hold some of its parameters, itself included; empty if no parameter is shared
    sharing: tuple[tuple[int, ...], ...] = ()


NO_REDUCTIONS = Reductions()


class ReductionTree:
    """The tree along which the results of a step are collected and distributed."""

    def __init__(self, spec: Placed) -> None:
        self.spec = spec
        last = spec.last_stage
        #: node -> the node nearer to the root; the root, which is first, has none
        self.parent: dict[Replica, Replica | None] = {}
        #: worker -> its node nearest to the root; a worker that holds no stage has none
        self.own: dict[int, Replica] = {}
        for route in range(spec.num_routes):
            new = [s for s in range(last, -1, -1) if spec.place(s, route) not in self.own]
            for stage in range(last, min(new, default=last + 1) - 1, -1):
                root = None if route == 0 else (last, 0)
                self.parent[stage, route] = root if stage == last else (stage + 1, route)
                self.own.setdefault(spec.place(stage, route), (stage, route))
        #: worker -> its nodes, from the root
        self._nodes: dict[int, list[Replica]] = {}
        for node in self.parent:
            self._nodes.setdefault(spec.place(*node), []).append(node)
        self.children: dict[Replica, list[Replica]] = {node: [] for node in self.parent}
        for node, parent in self.parent.items():
            if parent is not None:
                self.children[parent].append(node)
        #: nodes that contribute to the loss, or pass it on
        self._of_loss: set[Replica] = set()
        for route in range(spec.num_routes):
            above: Replica | None = self.own[spec.place(last, route)]
            while above is not None and above not in self._of_loss:
                self._of_loss.add(above)
                above = self.parent[above]

    def actions(self, worker: int, reductions: Reductions) -> list[Action]:
        """Return what `worker` collects and distributes, in the order of the tree: to the root, and back."""
        nodes = self._nodes.get(worker, [])
        found = [C(*node) for node in reversed(nodes) if node in self._of_loss] + [D(*node) for node in nodes]
        if reductions.norms:
            found += [N(*node) for node in reversed(nodes)] + [T(*node) for node in nodes]
        if reductions.validated:
            found += [V(*shard) for shard in self.spec.hosted(worker)]
        return found

    def needs(self, action: Action, reductions: Reductions) -> tuple[list[Replica], list[Action]]:
        """Return what an action that ends a step needs: shards with all their gradients, and actions."""
        stage, kind, route = action
        node = stage, route
        if kind is G:
            return [node], []
        if kind is U:
            awaited = self.awaited(self.spec.place(*node), reductions)
            exchanged = self.exchanged(stage, reductions)
            return ([], exchanged + awaited) if exchanged else ([node], awaited)
        if kind is V:
            return [], [U(*node), T(*self.own[self.spec.place(*node)])]
        if kind in _COLLECTED:
            parent = self.parent[node]
            return [], [(_COLLECTED[kind] if parent is None else kind)(*(parent or node))]
        worker = self.spec.place(*node)
        held = self.spec.hosted(worker) if self.own[worker] == node else []
        children = self.children[node]
        if kind is C:
            below = [C(*child) for child in children if child in self._of_loss]
            return [], below + [f for shard in held if shard[0] == self.spec.last_stage for f in self._forwards(*shard)]
        below = [N(*child) for child in children] + [D(*node)]  # gradients of summed losses are divided first
        first = [shard for shard in held if shard[1] == 0]
        if reductions.validated:
            return [], below + [U(*shard) for shard in first]  # U has noted the norms before it freed the gradients
        exchanged = [g for stage, _ in first for g in self.exchanged(stage, reductions)]
        alone = [shard for shard in first if not self.exchanged(shard[0], reductions)]
        return alone, below + list(dict.fromkeys(exchanged))

    def awaited(self, worker: int, reductions: Reductions) -> list[Action]:
        """Return the actions whose results the updates of `worker` need."""
        own = self.own[worker]
        return [T(*own)] if reductions.norms and not reductions.validated else [D(*own)] if reductions.weight else []

    def exchanged(self, stage: int, reductions: Reductions) -> list[Action]:
        """Return the exchanges whose gradients `stage` sums, in that order; none if it shares no weights."""
        stages = (reductions.sharing[stage] if reductions.sharing else ()) or (stage,)
        num_routes = self.spec.num_routes
        return [G(s, route) for s in stages for route in range(num_routes)] if len(stages) * num_routes > 1 else []

    def _forwards(self, stage: int, route: int) -> list[Action]:
        return [F(stage, m) for m in on_route(self.spec, range(self.spec.total_microbatches), route)]

    def successors(self, action: Action, reductions: Reductions = NO_REDUCTIONS) -> list[Action]:
        """Return the actions that the payload of one that ends a step flows to."""
        stage, kind, route = action
        if kind is G:
            # Norms are of route 0, on whose worker the gradients are needed anyway.
            return [U(g.stage, g.index) for g in self.exchanged(stage, reductions) if g != action]
        if kind in _COLLECTED:
            return [kind(*child) for child in self.children[stage, route]]
        for distributes, collected in _COLLECTED.items():
            if kind is collected:
                parent = self.parent[stage, route]
                return [distributes(stage, route) if parent is None else kind(*parent)]
        return []


@lru_cache(maxsize=256)
def reduction_tree(spec: Placed) -> ReductionTree:
    """Return the tree along which a step of `spec` ends."""
    return ReductionTree(spec)
