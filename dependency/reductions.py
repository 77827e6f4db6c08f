"""The end of a step as actions: gradients, losses and norms that updates need, and their way to every worker.

    G, S  exchange gradients: each holder of parameters gives its gradients to their owner, and takes the sums
    P, A  with ZeRO the holders take no sums, but the parameters when the owner has updated them
    C, N  collect along a tree whose root is the last stage: the loss, its weight and requests to stop; gradients' norms
    D, T  distribute the results down the same tree: the step's loss and whether to continue; the norm of all gradients
    V     validates an update that was made before the norm of all gradients was known: it stands, or is made again

The tree has a node on every worker: it leads from the last stage back along one route until it has reached all workers
of that route, then along the next route. So all edges are between neighbouring stages, and a worker that holds several
stages receives each result once. An update waits only for its needs: with a mean loss and without clipping it waits for
no other worker. The loss is known when the last forward has run. Norms exist only if an update needs them; they are
known when all backwards have run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

from .action import Action, Kind, Milestone
from .declared import Declared
from .indexes import join_route, route_in, split_route, split_step
from .kinds import A, C, D, F, G, H, N, P, S, T, U, V

#: kind that distributes a result -> kind that collects it
_COLLECTED = {D: C, T: N}
_DISTRIBUTED = {C: D, N: T}
#: a replica of a stage: (stage, route)
Replica = tuple[int, int]


def on_route(spec: Declared, microbatches: Iterable[int], route: int) -> Iterator[int]:
    """Return the microbatches that take a route."""
    if spec.num_routes == 1:
        return iter(microbatches)
    route_of = routes_of(spec)
    return (m for m in microbatches if route_of(m) == route)


@lru_cache(maxsize=16)
def routes_of(spec: Declared) -> Callable[[int], int]:
    """Return a function that gives the route of a microbatch, and remembers it: every worker asks for all."""
    return cache(spec.route)


class Reductions(NamedTuple):
    """The reductions over all stages that the updates of a step depend on."""

    #: the weight of the whole step: the loss is given as sums
    weight: bool = False
    #: the norms of all gradients: they are clipped
    norms: bool = False
    #: whether an update does not wait for them, and is validated when they are known (Qi et al. 2023, section 4)
    validated: bool = False
    #: of each tied parameter: (its stages, route on which the first stage owns it)
    tied: tuple[tuple[tuple[int, ...], int], ...] = ()
    #: by stage, the number of buckets in each replica's part of the parameters; empty: one
    buckets: tuple[int, ...] = ()
    #: whether there is an update, which needs the exchange of gradients
    updates: bool = True
    #: whether a worker's `N` waits for all that its updates need: then `T` is the commit record of the step
    commits: bool = False


NO_REDUCTIONS = Reductions()


class Bucket(NamedTuple):
    """Parameters whose gradients are exchanged together.

    Each replica of a stage owns a part of its parameters, in buckets. The owner sums the gradients of all replicas,
    which take the sums: together the bytes of a ring, in an order of sums that no timing changes.
    """

    number: int
    #: they hold these parameters, on all routes
    stages: tuple[int, ...]
    owner: Replica
    #: of a stream: pieces are counted through it
    step: int = 0

    def holders(self, num_routes: int) -> list[Replica]:
        """Return the holders, in the order in which gradients are summed."""
        return [(stage, route) for stage in self.stages for route in range(num_routes)]


class ReductionTree:
    """The tree along which the results of a step are collected and distributed."""

    def __init__(self, spec: Declared, reductions: Reductions = NO_REDUCTIONS) -> None:
        self.spec, self._reductions = spec, reductions
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
        #: by stage and number
        self._pieces: dict[int, dict[int, Bucket]] = {}
        #: nodes that contribute to the loss, or pass it on
        self._of_loss: set[Replica] = set()
        for route in range(spec.num_routes):
            above: Replica | None = self.own[spec.place(last, route)]
            while above is not None and above not in self._of_loss:
                self._of_loss.add(above)
                above = self.parent[above]

    def actions(self, worker: int) -> list[Action]:
        """Return the actions with which `worker` collects and distributes: towards the root, and back."""
        nodes = self._nodes.get(worker, [])
        found = [C(*node) for node in reversed(nodes) if node in self._of_loss] + [D(*node) for node in nodes]
        if self._reductions.norms:
            found += [N(*node) for node in reversed(nodes)] + [T(*node) for node in nodes]
        if self._reductions.validated:
            found += [V(*shard) for shard in self.spec.hosted(worker)]
        return found

    def needs(self, action: Action) -> tuple[list[Replica], list[Action]]:
        """Return the needs of an action that ends a step: shards with all their gradients, and actions."""
        stage, kind, index = action
        routes = self.spec.num_routes
        number, route = split_route(index, routes)
        node = stage, route
        if kind in (G, H):
            return [node], []
        if kind is S:
            holders = self._holders(stage, number)
            return [node], [G(s, join_route(number, r, routes)) for s, r in holders if (s, r) != node]
        if kind is U:
            awaited = self.awaited(self.spec.place(*node))
            sums = self._completing(*node, number)
            return ([], sums + awaited) if sums else ([node], awaited)
        if kind is P:
            return [], [self.update_of(action)]
        if kind is A:
            others = (each for each in self.pieces(stage, number) if each.owner != node)
            return [], [U(stage, index)] + [P(p.owner[0], join_route(p.number, p.owner[1], routes)) for p in others]
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
            return [], below + (self._losses(worker) if held else [])
        below = [N(*child) for child in children] + [D(*node)]  # gradients of summed losses are divided first
        first = [shard for shard in held if shard[1] == 0 or self.spec.parallelism.zero or self._reductions.commits]
        if self._reductions.validated:
            return [], below + [U(*shard) for shard in first]  # U has noted the norms before it freed the gradients
        sums = [each for shard in first for each in self._completing(*shard)]
        alone = [shard for shard in first if not self._completing(*shard)]
        return alone, below + list(dict.fromkeys(sums))

    def awaited(self, worker: int) -> list[Action]:
        """Return the actions with results that the updates of `worker` need."""
        own, known = self.own[worker], self._reductions
        if known.norms and not known.validated:
            return [T(*own)]
        return [D(*own)] if known.weight else []

    def pieces(self, stage: int, step: int | None = None) -> list[Bucket]:
        """Return the pieces of a stage's parameters that other shards hold too; tied stages number them alike.

        Args:
            step: of a stream; None: all.
        """
        return [p for p in self._numbered(stage).values() if step in (None, p.step)]

    def _numbered(self, stage: int) -> dict[int, Bucket]:
        if stage not in self._pieces:
            self._pieces[stage] = {piece.number: piece for piece in self._found_pieces(stage)}
        return self._pieces[stage]

    def update_of(self, action: Action) -> Action:
        """Return the update that takes an action's gradients, or that makes the parameters which the action gives."""
        number, route = split_route(action.index, self.spec.num_routes)
        piece = self._numbered(action.stage).get(number)
        step = piece.step if piece else 0
        return action if action.kind is U else U(action.stage, join_route(step, route, self.spec.num_routes))

    def share(self, milestone: Milestone) -> float:
        """Return the share of a backward after which a piece is complete: the buckets of the last layers are first."""
        stage, number = milestone.action.stage, milestone.number - len(self._reductions.tied)
        bucket = split_route(number, self.spec.num_routes)[0] if number >= 0 and self._reductions.buckets else 0
        return (bucket + 1) / (self._reductions.buckets[stage] if self._reductions.buckets and number >= 0 else 1)

    def num_parts(self, stage: int) -> int:
        """Return into how many parts the gradients of a stage are divided: a bucket or several for each route."""
        buckets = self._reductions.buckets
        return self.spec.num_routes * (buckets[stage] if buckets else 1)

    def _found_pieces(self, stage: int) -> list[Bucket]:
        if not (self.spec.takes_steps and self._reductions.updates):
            return []
        held = enumerate(self._reductions.tied)
        found = [Bucket(number, stages, (stages[0], route)) for number, (stages, route) in held if stage in stages]
        routes, begin = self.spec.num_routes, len(self._reductions.tied)
        if routes > 1:
            count = self.num_parts(stage)
            every = range(count * self.spec.num_steps)
            found += [Bucket(begin + n, (stage,), (stage, route_in(n, routes)), split_step(n, count)[0]) for n in every]
        return found

    def _holders(self, stage: int, number: int) -> list[Replica]:
        """Return the holders of a piece; an empty list for a piece that `reductions` lack, as in a trace."""
        piece = self._numbered(stage).get(number)
        return [*piece.holders(self.spec.num_routes)] if piece else []

    def sums(self, stage: int, route: int, step: int = 0) -> list[Action]:
        """Return the sums of gradients that an update takes; none if no other shard holds its parameters."""
        owners = ((piece.number, piece.owner) for piece in self.pieces(stage, step))
        return [S(owner[0], join_route(number, owner[1], self.spec.num_routes)) for number, owner in owners
                if not self.spec.parallelism.zero or owner == (stage, route)]  # fmt: skip

    def _completing(self, stage: int, route: int, step: int = 0) -> list[Action]:
        """Return the exchange of gradients that leaves a shard with the gradients of its update.

        With ZeRO the gradients for another owner leave first: norm and divisor are of the rest.
        """
        gives = self.given(G, stage, route, step) if self.spec.parallelism.zero else []
        return self.sums(stage, route, step) + gives

    def given(self, kind: Kind, stage: int, route: int, step: int = 0) -> list[Action]:
        """Return a replica's actions that give gradients to owners (`G`), or its sums (`S`) or parameters (`P`)."""
        node, routes = (stage, route), self.spec.num_routes
        return [kind(stage, join_route(piece.number, route, routes)) for piece in self.pieces(stage, step)
                if (piece.owner == node) is (kind is not G)]  # fmt: skip

    def _losses(self, worker: int) -> list[Action]:
        """Return the forwards of a worker that give losses."""
        spec, last = self.spec, self.spec.last_stage
        routes = [route for stage, route in spec.carried(worker) if stage == last]
        every = (F(last, m) for route in routes for m in on_route(spec, range(spec.total_microbatches), route))
        here = (each for each in every if spec.num_routes == 1 or spec.worker(each) == worker)
        return [each for each in here if spec.actions(last, each.index)]

    def successors(self, action: Action) -> list[Action]:
        """Return the actions that the payload of one that ends a step flows to."""
        stage, kind, route = action
        if kind is H:
            return [first for _, hand, first in self.spec.handovers if hand == action]
        if kind in (G, S, P):
            routes = self.spec.num_routes
            number, own = split_route(route, routes)
            node = stage, own
            if kind is G:
                piece = self._numbered(stage).get(number)
                return [S(piece.owner[0], join_route(number, piece.owner[1], routes))] if piece else []
            first = self.update_of(action).index - node[1]
            holders = [(s, first + r) for s, r in self._holders(stage, number)]
            if kind is P:
                return [A(s, at) for s, at in holders if (s, at - first) != node]
            # Norms are of route 0: its worker needs the sums anyway.
            return [] if self.spec.parallelism.zero else [U(*holder) for holder in holders]
        if kind in _COLLECTED:
            return [kind(*child) for child in self.children[stage, route]]
        if kind in _DISTRIBUTED:
            parent = self.parent[stage, route]
            return [_DISTRIBUTED[kind](stage, route) if parent is None else kind(*parent)]
        return []


@lru_cache(maxsize=256)
def reduction_tree(spec: Declared, reductions: Reductions = NO_REDUCTIONS) -> ReductionTree:
    """Return the tree along which a step of `spec` ends, with the reductions that its updates need."""
    return ReductionTree(spec, reductions)
