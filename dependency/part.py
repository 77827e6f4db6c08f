"""A worker's part of a step, with numbered actions: compiled once, run or simulated many times."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .action import RESOURCES, Action, Entry, Kind, Milestone, Pulled, Resource
from .indexes import route_in
from .kinds import A, D, F, G, P, S, U, V
from .order import routes
from .reductions import reduction_tree
from .spec import Spec


class Part:
    """The entries of a worker as read-only tables; the state of a run is kept elsewhere.

    Args:
        program: the worker's entries, in its order.
        chained: as for `entries`.
    """

    def __init__(self, spec: Spec, worker: int, program: Iterable[Entry], chained: Collection[int] = ()) -> None:
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
        self.inherited: list[dict[Action, list[int]]] = []
        #: resource -> numbers of its entries, in order
        self.queues: dict[Resource, list[int]] = {resource: [] for resource in RESOURCES}
        #: resource of each entry
        self.resources = [entry.action.kind.resource for entry in self.entries]
        #: action of this worker -> its number
        self.number = {entry.action: number for number, entry in enumerate(self.entries)}
        waiting, queues = self.waiting, self.queues
        for number, (action, own, pulled, _, _, _) in enumerate(self.entries):
            for need in own:
                waiting.setdefault(need, []).append(number)
                if isinstance(need, Milestone):
                    self.milestones.setdefault(need.action, []).append(need)
            for pull in pulled:
                if pull.action not in waiting:
                    self.pulls.append(pull)
                waiting.setdefault(pull.action, []).append(number)
            queues[self.resources[number]].append(number)
            self.num_forwards += action.kind.way == 1
        #: of a stream: slots of computing entries, which order the entries of several steps
        self.slots: list[int] = []
        if spec.synchronous:
            self.inherited.append({})
            self._inherit()
        elif spec.num_steps == 1:
            self._reach_back(chained)

    def _reach_back(self, chained: Collection[int]) -> None:
        """Let actions of a stream wait for actions of earlier steps, and updates for the end of the step before.

        So when a step is complete on a worker no later one has updated its weights.
        """
        spec = self.spec
        if self.forward_only:
            return
        from .earlier_steps import reaches  # few streams overlap

        told = [action for action in self.number if action.kind in (D, P, A)]
        begun: set[tuple[tuple[int, int], Kind]] = set()
        last_forward = {(self.shard(a), a.kind): a for a in self.number if a.kind.way == 1}
        for number, entry in enumerate(self.entries):
            action = entry.action
            self.slots.append(spec.slot(action) if spec.orders(action) else 0)
            if not spec.orders(action):
                continue
            needs, place = reaches(spec, action, spec.needs), (self.shard(action), action.kind)
            if action.kind is U:
                needs += [(1, other) for other in told]
            elif place not in begun and action.kind.way == 1 and action.stage in chained:
                needs.append((1, last_forward[place]))
            begun.add(place)
            if spec.parallelism.zero and action.kind is F:
                needs += [(steps, A(need.stage, need.index)) for steps, need in needs if need.kind is U]
            for steps, need in needs:
                while len(self.inherited) < steps:
                    self.inherited.append({})
                self.inherited[steps - 1].setdefault(need, []).append(number)

    def shard(self, action: Action) -> tuple[int, int]:
        """Return (stage, route) of the shard of `action`."""
        stage, kind, index = action
        route = (
            routes(self.spec, self.forward_only)(index)
            if kind.per_microbatch
            else route_in(index, self.spec.num_routes)
        )
        return stage, route

    def _inherit(self) -> None:
        """Let forwards and exchanges wait for their stage's update, and updates for the end of the step before.

        So all workers know of a stop in step k before step k + 2 updates, and no update follows one that may still be
        taken back.
        """
        spec = self.spec
        told = D(*reduction_tree(spec).own.get(self.worker, (-1, -1)))
        route_of = routes(spec)
        #: by shard, and by stage: the ends of its update
        updates: dict[Any, list[Action]] = {}
        for stage, kind, index in self.number:
            if kind is U:
                # A step that only adds up gradients takes no weights from their owners, the one before it may.
                ends = [U(stage, index), A(stage, index)] if spec.parallelism.zero else [U(stage, index)]
                for key in (stage, index), stage:
                    updates.setdefault(key, []).extend(ends)
        for number, entry in enumerate(self.entries):
            stage, kind, index = entry.action
            if kind.takes_update:
                # An evaluation has no updates. Where workers have gone, another replica may update the weights.
                for before in updates.get((stage, route_of(index)), updates.get(stage, ())):
                    self.inherited[0].setdefault(before, []).append(number)
            elif kind in (G, S):  # a replica without a microbatch would give the gradients of the step before
                self.inherited[0].setdefault(U(stage, route_in(index, spec.num_routes)), []).append(number)
            elif kind is U:
                for before in (told, V(stage, index)):
                    self.inherited[0].setdefault(before, []).append(number)
