"""Schedules given as lists: the placement and each worker's actions in order. Loads without torch.

They come from plans with a searched program and from tables of torch (`torch_csv`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar, NamedTuple

from ..dependency import Action, ConfigError, I, Order, R, Spec
from .plan import Plan, read_plan


class Program(NamedTuple):
    """The lists of a schedule."""

    #: actions by worker, in order
    rows: tuple[tuple[Action, ...], ...]
    #: route -> stage -> worker
    placement: tuple[tuple[int, ...], ...]
    #: microbatch -> route
    routes: tuple[int, ...]
    #: the I of every split backward
    split: frozenset[Action]
    #: stages that recompute
    recompute: frozenset[int]

    @classmethod
    def of(
        cls, rows: tuple[tuple[Action, ...], ...], placement: tuple[tuple[int, ...], ...], routes: tuple[int, ...]
    ) -> Program:
        """Return the program of these lists."""
        actions = [action for row in rows for action in row]
        split = frozenset(action for action in actions if action.kind is I)
        return cls(rows, placement, routes, split, frozenset(a.stage for a in actions if a.kind is R))


class ListedSchedule(Spec):
    """A searched program: its placement and order were found for a model's costs.

    With fewer microbatches, it runs the actions of those that exist.
    """

    source = "rpc-pipe plan: list scheduling and local search"
    listed: ClassVar[Program]
    #: its name in errors
    label: ClassVar[str] = "the program"

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.listed
        if self.num_workers != len(listed.rows):
            raise ConfigError(f"workers {self.num_workers}: {self.label} is for {len(listed.rows)}")
        if self.num_microbatches > len(listed.routes):
            raise ConfigError(
                f"microbatches {self.num_microbatches}: {self.label} lists {len(listed.routes)}; use at most those"
            )

    @property
    def order(self) -> Order:
        return "fixed"

    @property
    def num_stages(self) -> int:
        return len(self.listed.placement[0])

    @property
    def num_routes(self) -> int:
        return len(self.listed.placement)

    def route(self, microbatch: int) -> int:
        return self.listed.routes[microbatch]

    def place(self, stage: int, route: int) -> int:
        return self.listed.placement[route][stage]

    def splits(self, stage: int, microbatch: int) -> bool:
        return I(stage, microbatch) in self.listed.split

    def recomputes(self, stage: int) -> bool:
        return stage in self.listed.recompute

    def program(self, worker: int) -> Iterable[Action]:
        return (action for action in self.listed.rows[worker] if action.microbatch < self.num_microbatches)


@lru_cache(maxsize=64)
def listed_schedule(
    rows: tuple[tuple[Action, ...], ...], placement: tuple[tuple[int, ...], ...], routes: tuple[int, ...]
) -> type[ListedSchedule]:
    """Return the schedule of these lists; the same class for the same lists."""
    own = {"listed": Program.of(rows, placement, routes), "__doc__": ListedSchedule.__doc__}
    return type("Searched", (ListedSchedule,), own)


def program_of(plan: Plan) -> type[Spec]:
    """Return the schedule that a plan lists.

    Raises:
        ConfigError: its lists are no valid program.
    """
    try:
        rows = tuple(tuple(map(Action.parse, row.split())) for row in plan.program)
    except ValueError as error:
        raise ConfigError(f"plan: program: {error}") from None
    if not plan.placement:
        raise ConfigError("plan: placement: is needed with a program: by route and stage, the worker")
    routes = plan.routes or (0,) * plan.num_microbatches
    if len(routes) != plan.num_microbatches or any(route >= len(plan.placement) for route in routes):
        raise ConfigError(
            f"plan: routes {list(routes)}: must name a route for each of {plan.num_microbatches} microbatches"
        )
    for places in plan.placement:
        if len(places) != len(plan.cut) or any(worker >= len(rows) for worker in places):
            raise ConfigError(f"plan: placement {list(places)}: must name a worker for each of {len(plan.cut)} stages")
    return listed_schedule(rows, plan.placement, routes)


def read_program(path: str) -> type[Spec]:
    """Return the schedule of the best plan in a file.

    Raises:
        ConfigError: the plan lists no program.
    """
    plan = read_plan(path)
    if not plan.program:
        raise ConfigError(f"schedule {path}: the plan's schedule is {plan.schedule}; use its name, or --plan {path}")
    return program_of(plan)
