"""A worker's part of a step, with numbered actions: compiled once, run or simulated many times."""

from __future__ import annotations

from collections.abc import Iterable

from .action import RESOURCES, Action, Entry, Milestone, Pulled, Resource
from .indexes import route_in
from .kinds import U
from .order import routes
from .spec import Spec


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
        route = (
            routes(self.spec, self.forward_only)(index)
            if kind.per_microbatch
            else route_in(index, self.spec.num_routes)
        )
        return stage, route
