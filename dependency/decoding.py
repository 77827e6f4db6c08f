"""The relation of generation: groups of sequences are decoded token by token, each round of tokens a slice.

Round t of group g has the index t * groups + g. A round is a forward of one token on every stage, and the
keys and values stay there. The first stage's next round needs the token that the last stage has chosen:

    F(s, t) <- F(s-1, t)            F(0, t+1) <- F(last, t)

So a group has one action at a time, and groups in the number of stages keep all workers busy. In a round behind the
last one the first stage takes the last tokens.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache

from .action import Action, F, join_step, split_step
from .check import check_runs
from .order import routes
from .program import Part, entries
from .reductions import NO_REDUCTIONS, Reductions
from .spec import Spec


class Decoding(Spec):
    """Rounds of tokens, on the workers where a schedule has placed the stages."""

    placed: Spec
    groups: int

    @property
    def num_stages(self) -> int:
        return self.placed.num_stages

    @property
    def num_routes(self) -> int:
        return self.placed.num_routes

    @property
    def workers(self) -> Collection[int]:
        return self.placed.workers

    def place(self, stage: int, route: int) -> int:
        return self.placed.place(stage, route)

    def route(self, microbatch: int) -> int:
        return routes(self.placed, forward_only=True)(microbatch % self.groups)

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        behind = microbatch >= self.num_microbatches - self.groups
        return () if behind and stage else (F(stage, microbatch),)

    def after(self, action: Action) -> Iterable[Action]:
        return [] if action.stage else [F(self.last_stage, action.index - self.groups)]

    def successors(self, action: Action, reductions: Reductions = NO_REDUCTIONS) -> list[Action]:
        found = super().successors(action, reductions)
        goes_on = action.kind is F and action.stage == self.last_stage
        index = action.index + self.groups
        return [*found, F(0, index)] if goes_on and index < self.num_microbatches else found

    def slot(self, action: Action) -> int:
        number, group = split_step(action.index, self.groups)
        nominal = join_step(number, group + action.stage, max(self.groups, self.num_stages))
        return nominal * self.num_stages + action.stage


@lru_cache(maxsize=16)
def decoding_part(placed: Spec, worker: int, groups: int, rounds: int) -> Part:
    """Return the part of `worker` in some rounds of generation.

    Raises:
        ScheduleError: it cannot be run.
    """
    many = (rounds + 1) * groups
    spec = Decoding(num_workers=placed.num_workers, num_microbatches=many, placed=placed, groups=groups)
    check_runs(spec, [worker])
    return Part(spec, worker, entries(spec, worker, forward_only=True))
