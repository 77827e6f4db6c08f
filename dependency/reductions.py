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

from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

from .action import (  # isort: skip
    A, Action, C, D, F, G, H, Kind, Milestone, N, P, S, T, U, V, join_route, join_step, route_in, split_route,
)  # fmt: skip
from .declared import Declared

#: a replica of a stage: (stage, route)
Replica = tuple[int, int]
#: replicas with all their gradients, and actions
Needs = tuple[list[Replica], list[Action]]


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
    #: number of the update of each holder that takes the gradients: pieces are counted through a stream
    update: int = 0


class ReductionTree:
    """The tree along which the results of a step are collected and distributed."""

    def __init__(self, spec: Declared, reductions: Reductions = NO_REDUCTIONS) -> None:
        self.spec, self.reductions = spec, reductions
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
        self.nodes: dict[int, list[Replica]] = {}
        for node in self.parent:
            self.nodes.setdefault(spec.place(*node), []).append(node)
        self.children: dict[Replica, list[Replica]] = {node: [] for node in self.parent}
        for node, parent in self.parent.items():
            if parent is not None:
                self.children[parent].append(node)
        #: by stage and update
        self._pieces: dict[tuple[int, int], list[Bucket]] = {}
        #: nodes that contribute to the loss, or pass it on
        self.of_loss: set[Replica] = set()
        for route in range(spec.num_routes):
            above: Replica | None = self.own[spec.place(last, route)]
            while above is not None and above not in self.of_loss:
                self.of_loss.add(above)
                above = self.parent[above]

    def actions(self, worker: int) -> list[Action]:
        """Return the actions with which `worker` collects and distributes: towards the root, and back."""
        nodes = self.nodes.get(worker, [])
        found = [C(*node) for node in reversed(nodes) if node in self.of_loss] + [D(*node) for node in nodes]
        if self.reductions.norms:
            found += [N(*node) for node in reversed(nodes)] + [T(*node) for node in nodes]
        if self.reductions.validated:
            found += [V(*shard) for shard in self.spec.hosted(worker)]
        return found

    def node(self, action: Action) -> Replica:
        """Return (stage, route) of an action that ends a step."""
        return action.stage, route_in(action.index, self.spec.num_routes)

    def at(self, kind: Kind, number: int, replica: Replica) -> Action:
        """Return the action of a replica with the number of a piece, or of a step."""
        return kind(replica[0], join_route(number, replica[1], self.spec.num_routes))

    def held(self, node: Replica) -> list[Replica]:
        """Return the shards of the worker of a node, at its node nearest to the root; none at the others."""
        worker = self.spec.place(*node)
        return self.spec.hosted(worker) if self.own[worker] == node else []

    def needs(self, action: Action) -> Needs:
        """Return the needs of an action that ends a step: shards with all their gradients, and actions."""
        return ROWS[action.kind].needs(self, action, self.node(action))

    def successors(self, action: Action) -> list[Action]:
        """Return the actions that the payload of one that ends a step flows to."""
        return ROWS[action.kind].takers(self, action, self.node(action))

    def earlier(self, action: Action) -> list[Action]:
        """Return the actions of its worker in the step before that an action needs, without the flow of a stream."""
        if not action.kind.per_microbatch:
            return ROWS[action.kind].earlier(self, action, self.node(action))
        if not action.kind.takes_update:
            return []
        node, worker = (action.stage, routes_of(self.spec)(action.index)), self.spec.worker(action)
        # Where workers have gone, another replica here may update the weights.
        own = self.spec.place(*node) == worker
        here = [node] if own else [each for each in self.spec.hosted(worker) if each[0] == action.stage]
        # A step that only adds up gradients takes no weights from their owners, the one before it may.
        return [kind(*each) for each in here for kind in ((U, A) if self.spec.parallelism.zero else (U,))]

    def pieces(self, stage: int, route: int, update: int = 0) -> list[Bucket]:
        """Return the pieces of a replica's parameters that other shards hold too; tied stages number them alike.

        Args:
            update: number of the replica's update that takes their gradients.
        """
        alike = self.spec.alike(route)
        return [piece for piece in self._of_update(stage, update) if piece.owner[1] in alike]

    def _of_update(self, stage: int, update: int) -> list[Bucket]:
        if (stage, update) not in self._pieces:
            self._pieces[stage, update] = self._found_pieces(stage, update)
        return self._pieces[stage, update]

    def piece(self, action: Action) -> Bucket | None:
        """Return the piece of an action; None: `reductions` lack it, as in a trace."""
        number, _ = split_route(action.index, self.spec.num_routes)
        update = max(0, number - len(self.reductions.tied)) // self.num_parts(action.stage)
        return next((piece for piece in self._of_update(action.stage, update) if piece.number == number), None)

    def update_of(self, action: Action) -> Action:
        """Return the update that takes an action's gradients, or that makes the parameters which the action gives."""
        if action.kind is U:
            return action
        piece = self.piece(action)
        return self.at(U, piece.update if piece else 0, self.node(action))

    def of_holders(self, kind: Kind, action: Action) -> list[Action]:
        """Return the actions of all holders of an action's piece, in the order of sums: updates, or those of it."""
        piece = self.piece(action)
        if piece is None:
            return []
        number, routes = piece.update if kind is U else piece.number, self.spec.alike(piece.owner[1])
        return [self.at(kind, number, (stage, route)) for stage in piece.stages for route in routes]

    def above(self, node: Replica, kind: Kind, other: Kind) -> list[Action]:
        """Return the action of `kind` at the node nearer to the root; at the root, the one of `other` there."""
        parent = self.parent[node]
        return [other(*node)] if parent is None else [kind(*parent)]

    def share(self, milestone: Milestone) -> float:
        """Return the share of a backward after which a piece is complete: the buckets of the last layers are first."""
        stage, number = milestone.action.stage, milestone.number - len(self.reductions.tied)
        bucket = split_route(number, self.spec.num_routes)[0] if number >= 0 and self.reductions.buckets else 0
        return (bucket + 1) / (self.reductions.buckets[stage] if self.reductions.buckets and number >= 0 else 1)

    def num_parts(self, stage: int) -> int:
        """Return into how many parts the gradients of a stage are divided: a bucket or several for each route."""
        buckets = self.reductions.buckets
        return self.spec.num_routes * (buckets[stage] if buckets else 1)

    def _found_pieces(self, stage: int, update: int) -> list[Bucket]:
        if not self.reductions.updates or update >= self.spec.num_rounds * self.spec.num_steps:
            return []
        held = enumerate(self.reductions.tied)
        found = [Bucket(number, stages, (stages[0], route)) for number, (stages, route) in held if stage in stages]
        routes, begin = self.spec.num_routes, len(self.reductions.tied)
        if routes > self.spec.num_separate:
            every = range(self.num_parts(stage))
            first = join_step(update, begin, len(every))
            found += [Bucket(first + n, (stage,), (stage, route_in(n, routes)), update) for n in every]
        return found

    def sums(self, stage: int, route: int, update: int = 0) -> list[Action]:
        """Return the sums of gradients that an update takes; none if no other shard holds its parameters."""
        owners = ((piece.number, piece.owner) for piece in self.pieces(stage, route, update))
        return [self.at(S, *each) for each in owners if not self.spec.parallelism.zero or each[1] == (stage, route)]

    def completing(self, stage: int, route: int, update: int = 0) -> list[Action]:
        """Return the exchange of gradients that leaves a shard with the gradients of its update.

        With ZeRO the gradients for another owner leave first: norm and divisor are of the rest.
        """
        gives = self.given(G, stage, route, update) if self.spec.parallelism.zero else []
        return self.sums(stage, route, update) + gives

    def given(self, kind: Kind, stage: int, route: int, update: int = 0) -> list[Action]:
        """Return a replica's actions that give gradients to owners (`G`), or its sums (`S`) or parameters (`P`)."""
        node, pieces = (stage, route), self.pieces(stage, route, update)
        return [self.at(kind, piece.number, node) for piece in pieces if (piece.owner == node) is (kind is not G)]

    def losses(self, worker: int) -> list[Action]:
        """Return the forwards of a worker that give losses."""
        spec, last = self.spec, self.spec.last_stage
        routes = [route for stage, route in spec.carried(worker) if stage == last]
        every = (F(last, m) for route in routes for m in on_route(spec, range(spec.total_microbatches), route))
        here = (each for each in every if spec.num_routes == 1 or spec.worker(each) == worker)
        return [each for each in here if spec.actions(last, each.index)]


class EndRow(NamedTuple):
    """How actions of a kind end a step: functions of the tree, an action, and the action's (stage, route)."""

    #: shards with all their gradients, and actions
    needs: Callable[[ReductionTree, Action, Replica], Needs]
    #: the actions that its payload flows to
    takers: Callable[[ReductionTree, Action, Replica], list[Action]] = lambda tree, action, node: []
    #: needs in the step before, on the same worker
    earlier: Callable[[ReductionTree, Action, Replica], list[Action]] = lambda tree, action, node: []


def _for_update(tree: ReductionTree, action: Action, node: Replica) -> Needs:
    own, known = tree.own[tree.spec.place(*node)], tree.reductions
    awaited = [T(*own)] if known.norms and not known.validated else [D(*own)] if known.weight else []
    sums = tree.completing(*node, split_route(action.index, tree.spec.num_routes)[0])
    return ([], sums + awaited) if sums else ([node], awaited)


def _of_owners(tree: ReductionTree, action: Action, node: Replica) -> Needs:
    pieces = tree.pieces(*node, split_route(action.index, tree.spec.num_routes)[0])
    return [], [U(*action[::2]), *(tree.at(P, each.number, each.owner) for each in pieces if each.owner != node)]


def _for_loss(tree: ReductionTree, action: Action, node: Replica) -> Needs:
    below = [C(*child) for child in tree.children[node] if child in tree.of_loss]
    return [], below + (tree.losses(tree.spec.place(*node)) if tree.held(node) else [])


def _for_norms(tree: ReductionTree, action: Action, node: Replica) -> Needs:
    below = [N(*child) for child in tree.children[node]] + [D(*node)]  # gradients of summed losses are divided first
    every = tree.spec.parallelism.zero or tree.reductions.commits
    first = [shard for shard in tree.held(node) if shard[1] == 0 or every]
    if tree.reductions.validated:
        return [], below + [U(*shard) for shard in first]  # U has noted the norms before it freed the gradients
    sums = dict.fromkeys(each for shard in first for each in tree.completing(*shard))
    return [shard for shard in first if not tree.completing(*shard)], [*below, *sums]


def _end_before(tree: ReductionTree, action: Action, node: Replica) -> list[Action]:
    """Return the end of the step before on the worker of an update.

    So all workers know of a stop in step k before step k + 2 updates, and no update follows one that may still be taken
    back. In a stream no later step has updated weights when a step is complete.
    """
    spec, worker = tree.spec, tree.spec.place(*node)
    if spec.synchronous:
        return [D(*tree.own[worker]), V(*node)]
    every = [(*shard, n) for shard in spec.hosted(worker) if spec.parallelism.zero for n in range(spec.num_rounds)]
    given = ([*tree.given(P, *each), tree.at(A, each[2], each[:2])] for each in every)
    return [D(*node) for node in tree.nodes[worker]] + [each for actions in given for each in actions]


#: of each kind that ends a step, its needs, the actions that take its payload, and its needs in the step before
ROWS: dict[Kind, EndRow] = {
    H: EndRow(
        lambda tree, action, node: ([node], []),
        lambda tree, action, node: [first for _, hand, first in tree.spec.handovers if hand == action],
    ),
    # A replica without a microbatch would give the gradients of the step before.
    G: EndRow(
        lambda tree, action, node: ([node], []),
        lambda tree, action, node: [tree.at(S, piece.number, piece.owner)] if (piece := tree.piece(action)) else [],
        lambda tree, action, node: [U(*node)],
    ),
    S: EndRow(
        lambda tree, action, node: ([node], [each for each in tree.of_holders(G, action) if tree.node(each) != node]),
        # Norms are of route 0: its worker needs the sums anyway.
        lambda tree, action, node: [] if tree.spec.parallelism.zero else tree.of_holders(U, action),
        lambda tree, action, node: [U(*node)],
    ),
    U: EndRow(_for_update, earlier=_end_before),
    P: EndRow(
        lambda tree, action, node: ([], [tree.update_of(action)]),
        lambda tree, action, node: [A(*each[::2]) for each in tree.of_holders(U, action) if tree.node(each) != node],
    ),
    A: EndRow(_of_owners),
    C: EndRow(_for_loss, lambda tree, action, node: tree.above(node, C, D)),
    D: EndRow(
        lambda tree, action, node: ([], tree.above(node, D, C)),
        lambda tree, action, node: [D(*child) for child in tree.children[node]],
    ),
    N: EndRow(_for_norms, lambda tree, action, node: tree.above(node, N, T)),
    T: EndRow(
        lambda tree, action, node: ([], tree.above(node, T, N)),
        lambda tree, action, node: [T(*child) for child in tree.children[node]],
    ),
    V: EndRow(lambda tree, action, node: ([], [U(*node), T(*tree.own[tree.spec.place(*node)])])),
}


@lru_cache(maxsize=256)
def reduction_tree(spec: Declared, reductions: Reductions = NO_REDUCTIONS) -> ReductionTree:
    """Return the tree along which a step of `spec` ends, with the reductions that its updates need."""
    return ReductionTree(spec, reductions)
