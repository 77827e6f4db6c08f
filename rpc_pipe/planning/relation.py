"""The compiled dependency graph of all workers: every action of a step, or of several, as a number.

It joins the parts that workers compile for themselves (`dependency.program`), so the simulator obeys the same relation.
Loads without torch.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..dependency import (  # isort: skip
    NO_REDUCTIONS, RESOURCES, Action, Milestone, Part, Reductions, ScheduleError, Spec, entries, reduction_tree,
)  # fmt: skip
from ..dependency.versions import step_of
from ..system.garbage import uncollected


class Relation:
    """A graph of numbered actions; those of a worker are consecutive, in its order. Built once, simulated often.

    Args:
        steps: how many steps follow each other; a forward needs its stage's update of the step before.
        reductions: the updates of the step depend on them.
        lengths: of the microbatches of a step, in the order of the run; empty: they are equal.

    Raises:
        ScheduleError: an edge names an action that no worker runs, or a slot is taken twice.
    """

    def __init__(
        self, spec: Spec, steps: int = 1, reductions: Reductions = NO_REDUCTIONS, lengths: Sequence[float] = ()
    ) -> None:
        spec, self.steps = spec.following(steps)
        self.spec, self.lengths = spec, lengths
        self.reductions, self._tree = reductions, reduction_tree(spec, reductions)
        workers = range(spec.num_workers)
        with uncollected():
            self._put_together([Part(spec, worker, entries(spec, worker, reductions=reductions)) for worker in workers])

    def _put_together(self, parts: list[Part]) -> None:
        steps = self.steps
        #: worker -> its first number; one more at the end
        self.first = [*accumulate((steps * len(part.entries) for part in parts), initial=0)]
        self.actions: list[Action] = []
        #: of each action its worker, and its lane: a number for one resource of one worker
        self.worker, self.lane = list[int](), list[int]()
        #: how many needs each action has
        self.num_needs: list[int] = []
        for worker, part in enumerate(parts):
            actions = [entry.action for entry in part.entries]
            self.actions += steps * actions
            self.worker += [worker] * (steps * len(actions))
            self.lane += steps * [len(RESOURCES) * worker + RESOURCES.index(action.kind.resource) for action in actions]
            self.num_needs += steps * part.num_needs
        #: number -> actions of the same worker that need it
        self.own: list[list[int]] = [[] for _ in self.actions]
        #: number -> actions of other workers that need it
        self.others: list[list[int]] = [[] for _ in self.actions]
        #: (number, worker): that worker waits for the action, but does not take its output
        self.signals: set[tuple[int, int]] = set()
        #: number -> (share of its time, actions of the same worker that need a milestone there)
        self.within: dict[int, list[tuple[float, list[int]]]] = {}
        for step in range(steps):
            self._connect(parts, step)

    @property
    def num_steps(self) -> int:
        return self.steps * self.spec.num_steps

    def step(self, number: int) -> int:
        """Return the step of an action; -1: it ends several steps of a stream."""
        if self.spec.num_steps > 1:
            return step_of(self.spec, self.actions[number])
        first, end = self.first[self.worker[number] :][:2]
        return (number - first) * self.steps // (end - first)

    def length(self, action: Action) -> float:
        """Return the length of an action's microbatch; 0: all are equal, or it is the action of a step."""
        if not self.lengths or not action.kind.per_microbatch:
            return 0
        return self.lengths[self.spec.whole_microbatch(action)]

    def portion(self, action: Action) -> float:
        """Return the bytes of an action's activations relative to a mean microbatch's."""
        length = self.length(action)
        return self.spec.share(action) * (length * len(self.lengths) / sum(self.lengths) if length else 1)

    def gradient_parts(self, stage: int) -> int:
        """Return into how many parts the gradients of a stage are divided: a bucket or several for each route."""
        return self._tree.num_parts(stage)

    @property
    def num_lanes(self) -> int:
        return len(RESOURCES) * self.spec.num_workers

    def _connect(self, parts: list[Part], step: int) -> None:
        """Add the edges within one step, and the edges from the step before."""
        starts = [first + step * len(part.entries) for first, part in zip(self.first, parts, strict=False)]
        own, others = self.own, self.others
        for start, part in zip(starts, parts, strict=True):
            waiting = part.waiting
            met = 0
            for number, entry in enumerate(part.entries, start):
                numbers = waiting.get(entry.action)
                if numbers:
                    own[number] = [start + waits for waits in numbers] if start else numbers.copy()
                    met += 1
            for need in part.pulls:
                at = parts[need.worker].number.get(need.action)
                if at is not None:
                    others[starts[need.worker] + at] += [start + waits for waits in waiting[need.action]]
                    met += 1
                    if not need.carries:
                        self.signals.add((starts[need.worker] + at, part.worker))
            for action, milestones in part.milestones.items():
                number = start + part.number[action]
                for milestone in milestones:
                    self._announce(number, milestone, [start + waits for waits in waiting[milestone]])
                met += len(milestones)
            if met < len(waiting):
                self._refuse(parts, part)
            if step:
                before = start - len(part.entries)
                for action, numbers in part.inherited[0].items():
                    if action not in part.number:
                        continue
                    own[before + part.number[action]] += [start + waits for waits in numbers]
                    for waits in numbers:
                        self.num_needs[start + waits] += 1

    def _announce(self, number: int, milestone: Milestone, waiting: list[int]) -> None:
        share = self._tree.share(milestone)
        if share < 1:
            self.within.setdefault(number, []).append((share, waiting))
        else:
            self.own[number] += waiting

    def _refuse(self, parts: list[Part], part: Part) -> None:
        for entry in part.entries:
            for need in (*entry.own, *(pulled.action for pulled in entry.pulled)):
                if not any(need in other.number for other in parts):
                    raise ScheduleError(f"{entry.action} needs {need}, which no worker runs")

    def targets(self, number: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (worker, its actions that need `number`) of the other workers."""
        found: dict[int, list[int]] = {}
        for user in self.others[number]:
            found.setdefault(self.worker[user], []).append(user)
        yield from found.items()
