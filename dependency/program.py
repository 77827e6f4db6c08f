"""A worker's part of the relation, compiled: its actions in order, each with its needs, sources and consumers.

Only this file compiles a spec: the checker, the worker's state machine and the simulator all read the
entries that it makes. The data flow is the same for all microbatches with the same kinds of actions, so the spec is
asked about it once for each stage and kind.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from .action import (  # isort: skip
    RESOURCES, A, Action, B, C, D, Entry, F, G, Kind, Milestone, Pulled, Resource, S, U, route_in, split_route,
)  # fmt: skip
from .errors import ScheduleError
from .order import has_program, has_slot, is_uniform, local_order, routes
from .reductions import NO_REDUCTIONS, Reductions, Replica, reduction_tree
from .spec import Spec
from .versions import before_forward, update_before, update_of

#: key for all replicas of a worker
_WHOLE_WORKER = -1, -1


def entries(
    spec: Spec,
    worker: int,
    *,
    forward_only: bool = False,
    reductions: Reductions = NO_REDUCTIONS,
    chained: Collection[int] = (),
) -> Iterator[Entry]:
    """Yield the program of `worker`, lazily.

    Args:
        forward_only: keep forwards alone, for an evaluation.
        reductions: the updates of the step depend on them.
        chained: stages whose forwards must keep the worker's order, because one reads what an earlier one wrote.

    Raises:
        ScheduleError: two actions of the worker share a slot, or its activation limit is too small.
    """
    flow = _Flow(spec, worker, reductions, forward_only=forward_only)
    edges = _OrderEdges(spec, worker, reductions, frozenset(chained), forward_only=forward_only)
    versioned, reaching = not (forward_only or spec.synchronous), None
    order: Iterable[Action] = local_order(spec, worker, reductions)
    if versioned and spec.num_steps == 1:
        from .earlier_steps import EarlierSteps

        reaching = EarlierSteps(spec, reductions, order := [*order], chained)
    handed = {first: hand for _, hand, first in spec.handovers}
    for action in order:
        if forward_only and not flow.goes_forward(action):
            continue
        own: list[Action | Milestone] = []
        pulled: list[Pulled] = []
        if spec.orders(action):
            for need in spec.after(action):
                if need.index >= 0 and (not forward_only or flow.goes_forward(need)):
                    at = spec.worker(need)
                    if at == worker:
                        own.append(need)
                    else:
                        carries = worker in map(spec.worker, spec.successors(need))
                        pulled.append(Pulled(need, at, carries))
        if versioned and action.kind is F:
            for update in before_forward(spec, action):
                own += (update, A(action.stage, update.index)) if spec.parallelism.zero else (update,)
        if action in handed:
            pulled.append(Pulled(handed[action], spec.worker(handed[action]), True))
        own += edges.of(action)
        entry = flow.entry(action, own, pulled)
        yield entry if reaching is None else entry._replace(earlier=reaching.of(action))


class _Pattern(NamedTuple):
    """An entry without its microbatch."""

    own: tuple[tuple[int, Kind], ...]
    pulled: tuple[tuple[int, Kind, int], ...]
    consumers: tuple[int, ...]
    sources: tuple[tuple[int, Kind], ...]
    here: bool
    earlier: tuple[tuple[int, Action], ...]


class _Flow:
    """The data flow of a worker's actions: needs and destinations of payloads."""

    def __init__(self, spec: Spec, worker: int, reductions: Reductions, *, forward_only: bool) -> None:
        self._spec, self._worker, self._forward_only = spec, worker, forward_only
        self._tree = reduction_tree(spec, reductions)
        self._uniform, self._in_parts = is_uniform(spec), bool(spec.handovers)
        self._route = routes(spec)
        self._patterns: dict[tuple[object, ...], _Pattern] = {}
        self._kinds: dict[tuple[int, int], tuple[Kind, ...]] = {}

    def entry(self, action: Action, own: Sequence[Action | Milestone], pulled: Sequence[Pulled]) -> Entry:
        """Return the entry of `action`, which also waits for `own` and `pulled`, by the schedule or the order."""
        new = tuple.__new__  # twice as fast as the named tuple's constructor, where a compile spends most of its time
        stage, kind, m = action
        if not kind.per_microbatch:
            return self._end(action, own, pulled)
        key: tuple[object, ...] = stage, kind, self._route(m)
        if not self._uniform:
            key = *key, *(self._kinds_of(s, m) for s in (stage - 1, stage, stage + 1))
        if self._in_parts:
            near = range(max(0, stage - 1), min(stage + 1, self._spec.last_stage) + 1)
            key = *key, *(self._spec.worker(F(s, m)) for s in near)
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._pattern(action)
        own_kinds, pulled_kinds, consumers, sources, here, earlier = pattern
        needs = [new(Action, (s, k, m)) for s, k in own_kinds]
        all_own = (*needs, *(need for need in own if need not in needs)) if own else tuple(needs)
        all_pulled = (*[new(Pulled, (new(Action, (s, k, m)), at, True)) for s, k, at in pulled_kinds], *pulled)
        origins = tuple([new(Action, (s, k, m)) for s, k in sources])
        return new(Entry, (action, all_own, all_pulled, consumers, origins, here, earlier))

    def goes_forward(self, action: Action) -> bool:
        """Return whether an evaluation runs `action`: all up to the payload for the next stage, and the step's end.

        An evaluation also drops weights, if a step drops these before a backward: a device may have no room for all.
        """
        stage, kind, m = action
        if not kind.per_microbatch:
            return kind is C or kind is D
        kinds = self._kinds_of(stage, 0 if self._uniform else m)
        before, later = kinds[: kinds.index(kind)], kinds[kinds.index(kind) :]
        drops = kind.holds < kind.keeps and not any(other.way < 0 or other.accumulates for other in before)
        return drops or any(other.way == 1 for other in later)

    def _kinds_of(self, stage: int, m: int) -> tuple[Kind, ...]:
        found = self._kinds.get((stage, m))
        if found is None:
            there = 0 <= stage <= self._spec.last_stage
            found = self._kinds[stage, m] = tuple(a.kind for a in self._spec.actions(stage, m)) if there else ()
        return found

    def _pattern(self, action: Action) -> _Pattern:
        spec, worker = self._spec, self._worker
        placed = [(need, spec.worker(need)) for need in spec.data(action)]
        if self._forward_only and (late := [need for need, _ in placed if not self.goes_forward(need)]):
            raise ScheduleError(f"actions: {action} is part of an evaluation and needs {late[0]}, which is not")
        origin = spec.origin(action)
        consumers = {spec.worker(follower) for follower in spec.successors(action)}
        own = tuple((need.stage, need.kind) for need, at in placed if at == worker)
        pulled = tuple((need.stage, need.kind, at) for need, at in placed if at != worker)
        takers, sources = tuple(sorted(consumers - {worker})), () if origin is None else ((origin.stage, origin.kind),)
        return _Pattern(own, pulled, takers, sources, worker in consumers, self._earlier(action))

    def _earlier(self, action: Action) -> tuple[tuple[int, Action], ...]:
        """Return the needs of an action in the step before a synchronous one."""
        has_updates = self._spec.synchronous and not self._forward_only
        return tuple((1, need) for need in self._tree.earlier(action)) if has_updates else ()

    def _end(self, action: Action, own: Sequence[Action | Milestone], pulled: Sequence[Pulled]) -> Entry:
        spec, worker = self._spec, self._worker
        _, others = self._tree.needs(action)
        placed = [(need, spec.worker(need)) for need in others]
        consumers = {spec.worker(follower) for follower in self._tree.successors(action)}
        here = (*own, *(need for need, at in placed if at == worker))
        there = (*(Pulled(need, at, True) for need, at in placed if at != worker), *pulled)
        takers, sources = tuple(sorted(consumers - {worker})), tuple(n for n in others if not n.kind.per_microbatch)
        return Entry(action, here, there, takers, sources, worker in consumers, self._earlier(action))


def peaks_in_order(program: Iterable[Action]) -> list[int]:
    """Return the most microbatches held from F to B (or W) in the program's order, by how many have begun."""
    held, peaks = 0, [0]
    for action in program:
        held += action.kind.keeps
        if action.kind.keeps > 0:
            peaks.append(max(peaks[-1], held))
    return peaks


def order_limit(spec: Spec, worker: int) -> int | None:
    """Return how many activations the worker's order lets it hold; a listed program is a limit by itself."""
    limit = spec.activation_limit(worker)
    if limit is None and has_program(spec) and not has_slot(spec):
        limit = peaks_in_order(spec.program(worker))[-1]
    return limit


class _OrderEdges:
    """The edges that follow from a worker's order, in addition to the schedule's.

    Gradients of a shard are summed in this order, so each B or W waits for the one before it. The sum is then the same
    for any order of arrival, and no gradient has to be set aside. The forwards of a stage wait in the same way if they
    write its buffers. With an activation limit L, the k-th F of the worker waits for its (k-L)-th B or W; other kinds
    that begin and end the life of activations do the same. This edge points backwards in the order, so unlike a counter
    it cannot deadlock.
    """

    def __init__(
        self, spec: Spec, worker: int, reductions: Reductions, chained: frozenset[int], *, forward_only: bool
    ) -> None:
        self._spec = spec
        self._worker = worker
        self._tree = reduction_tree(spec, reductions)
        self._chained = chained
        self._route = routes(spec, forward_only)
        self._limit = None if forward_only else order_limit(spec, worker)
        self._num_begun = 0
        self._releases: list[Action] = []  # only if there is a limit
        self._last_release: dict[Replica, Action] = {}
        self._last_forward: dict[Replica, Action] = {}
        #: update of a stream -> the last action that adds to its gradients
        self._last_of: dict[Action, Action] = {}
        self._takes = not spec.synchronous

    def of(self, action: Action) -> Sequence[Action | Milestone]:
        """Return the edges of `action`, which is the next in the order."""
        stage, kind, index = action
        if not kind.per_microbatch:
            return self._gradients_before(action)
        before: Action | None = None
        releases = self._limit is not None and kind.keeps < 0
        if kind.accumulates or releases:
            # With a limit the releases of the whole worker are one chain.
            shard = (stage, self._route(index)) if self._limit is None else _WHOLE_WORKER
            before = self._last_release.get(shard)
            self._last_release[shard] = action
            if self._takes and kind.accumulates:
                self._last_of[update_of(self._spec, stage, index)] = action
            if releases:
                self._releases.append(action)
        if kind.way == 1 and stage in self._chained:
            shard = stage, self._route(index)
            before = self._last_forward.get(shard)
            self._last_forward[shard] = action
        edges = [] if before is None else [before]
        if kind.keeps > 0 and self._limit is not None:
            edges += self._released_before(action, self._limit)
        return edges

    def _gradients_before(self, action: Action) -> list[Action | Milestone]:
        """Return the last B or W of each shard with gradients that `action` needs: it waits for all earlier ones.

        An exchange needs its piece alone, a milestone of that backward. In a stream these are of one update, which also
        needs the update before it.
        """
        shards, _ = self._tree.needs(action)
        if self._takes and action.kind.resource != "control":
            update = self._tree.update_of(action)
            needs = [self._last_of.get(update)] if shards or action is update else []
            if action is update:
                needs.append(update_before(self._spec, update))
            return [need for need in needs if need is not None]
        last = (self._last_release.get(shard if self._limit is None else _WHOLE_WORKER) for shard in shards)
        found = dict.fromkeys(release for release in last if release is not None)
        if action.kind not in (G, S):
            return [*found]
        piece, route = split_route(action.index, self._spec.num_routes)
        return [
            # A later backward of another shard may stand for the last of this one.
            Milestone(last, piece) if last.kind is B and (last.stage, self._route(last.index)) == (action.stage, route)
            else last for last in found
        ]  # fmt: skip

    def _released_before(self, action: Action, limit: int) -> list[Action]:
        k = self._num_begun
        self._num_begun += 1
        if k < limit:
            return []
        if k - limit >= len(self._releases):
            held = f"it holds the activations of {k + 1 - len(self._releases)} forwards when it starts {action}"
            raise ScheduleError(f"activation_limit({self._worker}) is {limit}, but in its order {held}")
        return [self._releases[k - limit]]


class Part:
    """The entries of a worker as read-only tables; the state of a run is kept elsewhere.

    Args:
        program: the worker's entries, in its order.
    """

    def __init__(self, spec: Spec, worker: int, program: Iterable[Entry]) -> None:
        self.spec = spec
        self.worker = worker
        self.entries = list(program)
        #: whether this is an evaluation
        self.forward_only = all(entry.action.kind is not U for entry in self.entries)
        #: number of needs of each entry within its step
        self.num_needs = [len(entry.own) + len(entry.pulled) for entry in self.entries]
        #: need -> numbers of the entries that wait for it
        self.waiting: dict[Action | Milestone, list[int]] = {}
        #: action -> the milestones in it that are needed
        self.milestones: dict[Action, list[Milestone]] = {}
        #: the needs on other workers, each once
        self.pulls: list[Pulled] = []
        #: number of forwards
        self.num_forwards = 0
        #: for each earlier step, the latest first: this worker's action in it -> entries of this step that wait for it
        self.inherited: list[dict[Action, list[int]]] = [{}]
        #: resource -> numbers of its entries, in order
        self.queues: dict[Resource, list[int]] = {resource: [] for resource in RESOURCES}
        #: resource of each entry
        self.resources = [entry.action.kind.resource for entry in self.entries]
        #: action of this worker -> its number
        self.number = {entry.action: number for number, entry in enumerate(self.entries)}
        waiting, queues = self.waiting, self.queues
        for number, (action, own, pulled, _, _, _, earlier) in enumerate(self.entries):
            for need in own:
                waiting.setdefault(need, []).append(number)
                if isinstance(need, Milestone):
                    self.milestones.setdefault(need.action, []).append(need)
            for pull in pulled:
                if pull.action not in waiting:
                    self.pulls.append(pull)
                waiting.setdefault(pull.action, []).append(number)
            for steps, need in earlier:
                self.inherited += [{} for _ in range(steps - len(self.inherited))]
                self.inherited[steps - 1].setdefault(need, []).append(number)
            queues[self.resources[number]].append(number)
            self.num_forwards += action.kind.way == 1
        #: of a stream: slots of computing entries, which order the entries of several steps
        self.slots: list[int] = []
        if not (spec.synchronous or self.forward_only):
            actions = [entry.action for entry in self.entries]
            self.slots = [spec.slot(action) if spec.orders(action) else 0 for action in actions]

    def shard(self, action: Action) -> tuple[int, int]:
        """Return (stage, route) of the shard of `action`."""
        stage, kind, index = action
        found = routes(self.spec, self.forward_only)
        route = found(index) if kind.per_microbatch else route_in(index, self.spec.num_routes)
        return stage, route
