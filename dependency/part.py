"""A worker's part of a step with its actions numbered in order: compiled once, run or priced many times."""

from __future__ import annotations

from collections.abc import Iterable

from .action import RESOURCES, Action, Resource
from .ending import end_tree
from .kinds import D, U
from .program import Entry, Pulled
from .spec import Spec


class Part:
    """The entries of a worker as tables that are only read; what changes while they run is another's.

    Args:
        program: the worker's entries, in its order.
    """

    def __init__(self, spec: Spec, worker: int, program: Iterable[Entry]) -> None:
        self.spec = spec
        self.worker = worker
        self.entries = list(program)
        #: how many needs each has within its step
        self.num_needs = [len(entry.own) + len(entry.pulled) for entry in self.entries]
        #: need -> those that wait for it
        self.waiting: dict[Action, list[int]] = {}
        #: what other workers finish for this one, each once
        self.pulls: list[Pulled] = []
        #: how many forwards there are
        self.num_forwards = 0
        #: own action of the step before -> those of this step that wait for it
        self.inherited: dict[Action, list[int]] = {}
        #: resource -> those that occupy it, in order
        self.queues: dict[Resource, list[int]] = {resource: [] for resource in RESOURCES}
        #: own action -> its number
        self.number = {entry.action: number for number, entry in enumerate(self.entries)}
        waiting, queues = self.waiting, self.queues
        for number, (action, own, pulled, _, _, _) in enumerate(self.entries):
            for need in own:
                waiting.setdefault(need, []).append(number)
            for pull in pulled:
                if pull.action not in waiting:
                    self.pulls.append(pull)
                waiting.setdefault(pull.action, []).append(number)
            queues[action.kind.resource].append(number)
            self.num_forwards += action.kind.way == 1
        if spec.synchronous:
            self._inherit()

    def _inherit(self) -> None:
        """Let forwards wait for their stage's update, and updates for the end of the step before.

        So a stop that was wanted in a step is known everywhere before the step after the next one updates.
        """
        spec = self.spec
        told = D(*end_tree(spec).own.get(self.worker, (-1, -1)))
        replicated = spec.num_routes > 1
        for number, entry in enumerate(self.entries):
            stage, kind, index = entry.action
            if kind.way == 1:
                before = U(stage, spec.route(index) if replicated else 0)
            elif kind is U:
                before = told
            else:
                continue
            if before in self.number:  # an evaluation has no updates
                self.inherited.setdefault(before, []).append(number)
