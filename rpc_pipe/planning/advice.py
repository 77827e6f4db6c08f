"""What binds a plan, what relaxing it would buy, and what would make one fit where none does. Loads without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .compare import tell_bytes
from .plan import Plan
from .profile import Machines
from .search import Answer, Question, search
from .simulator import Link

#: schedules besides the best that are looked at where something is relaxed
_SCHEDULES = 4
#: relative gain from which on a limit binds
_GAIN = 0.01


@dataclass(frozen=True)
class Advice:
    """Something that could be changed, and what would come of it."""

    change: str
    predicted_ms: float
    #: relative to the best plan; 0 where none fits so far
    gain: float
    plan: Plan

    @property
    def sentence(self) -> str:
        """Say it."""
        how = f"{self.predicted_ms:.4g} ms with {self.plan.name}, {self.plan.num_microbatches} microbatches"
        return f"{self.change}: {how}" + (f" ({-self.gain:+.0%})" if self.gain else "")


def what_binds(question: Question, answer: Answer) -> list[Advice]:
    """Return what would make steps shorter, the most useful first: memory, links, microbatches, a worker more."""
    best = answer.plans[0]
    names = tuple(dict.fromkeys(plan.schedule for plan in answer.plans if not plan.program))[:_SCHEDULES]
    found = []
    for change, relaxed in _relaxed(question, answer):
        better = search(replace(relaxed, schedules=names, seconds=min(2.0, question.seconds / 6)))
        if better.plans:
            plan = better.plans[0]
            gain = 1 - plan.predicted_ms / best.predicted_ms if best.predicted_ms else 0
            if gain > _GAIN:
                found.append(Advice(change, plan.predicted_ms, gain, plan))
    return sorted(found, key=lambda advice: -advice.gain)


def _relaxed(question: Question, answer: Answer) -> Iterator[tuple[str, Question]]:
    machines = question.machines
    if any(limit is not None for limit in machines.memory):
        yield "without the limit of memory", replace(question, machines=replace(machines, memory=()))
    if machines.link != Link() or machines.links:
        yield "if links took no time", replace(question, machines=replace(machines, link=Link(), links={}))
    if len(set(machines.slowness)) > 1:
        fastest = (min(machines.slowness),) * machines.num_workers
        yield (
            "if all workers were as fast as the fastest",
            replace(question, machines=replace(machines, slowness=fastest)),
        )
    most = max(question.microbatches)
    if answer.plans and answer.plans[0].num_microbatches == most and 2 * most <= question.batch:
        yield f"with {2 * most} microbatches", replace(question, microbatches=(2 * most,))
    yield "with one worker more", replace(question, machines=more_workers(machines, 1))


def more_workers(machines: Machines, number: int) -> Machines:
    """Return the machines with so many workers more, each like the last."""
    return replace(
        machines,
        num_workers=machines.num_workers + number,
        slowness=machines.slowness + machines.slowness[-1:] * number,
        memory=machines.memory + machines.memory[-1:] * number,
    )


def what_would_fit(question: Question, answer: Answer) -> list[Advice]:
    """Return what would make a plan fit where none does, each tried: recompute, smaller microbatches, more workers."""
    found = []

    def attempt(change: Callable[[Plan], str], asked: Question) -> bool:
        fitting = search(replace(asked, seconds=min(3.0, question.seconds / 4)))
        if fitting.plans:
            plan = fitting.plans[0]
            found.append(Advice(change(plan), plan.predicted_ms, 0, plan))
        return bool(fitting.plans)

    if not question.recompute:
        attempt(lambda plan: "recompute", replace(question, recompute=True))
    largest = max(question.microbatches)
    counts = [count for count in (2 * largest, 4 * largest, question.batch) if largest < count <= question.batch]
    for count in counts:
        asked = replace(question, microbatches=(count,), recompute=True)
        if attempt(lambda plan: "smaller microbatches", asked):
            break
    num_workers = question.machines.num_workers
    most = question.profile.num_blocks - num_workers
    for number in sorted({min(n, most) for n in (1, 2, 4, num_workers, 3 * num_workers, 7 * num_workers) if most > 0}):
        machines = more_workers(question.machines, number)
        counts = sorted({*question.microbatches, min(question.batch, machines.num_workers)})
        asked = replace(question, machines=machines, microbatches=tuple(counts), recompute=True)
        if attempt(lambda plan: f"{plan.num_workers} workers", asked):
            break
    if answer.nearest is not None:
        needs = [used for used in answer.nearest.memory_by_worker]
        limits = [question.machines.limit(worker) for worker in range(num_workers)]
        over = [
            f"worker {worker} {tell_bytes(used)}"
            for worker, (used, limit) in enumerate(zip(needs, limits, strict=True))
            if limit is not None and used > limit
        ]
        change = f"memory for {', '.join(over)}"
        found.append(Advice(change, answer.nearest.predicted_ms, 0, answer.nearest))
    return found
