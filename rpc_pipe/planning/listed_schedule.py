"""Schedules given as lists: the placement and each worker's actions in order. Loads without torch.

They come from plans with a searched program, and from the CSV format of `torch.distributed.pipelining`, a row of
actions a rank, of torch 2.6 to 2.15. An exported schedule runs there over NCCL (`_PipelineScheduleRuntime`, in
torchtitan `pipeline_parallel_schedule_csv`). Since 2.7 torch reads from the file which rank holds a stage; 2.6 needs
`stage_index_to_group_rank` for any placement but stage modulo ranks. A rank's stages must be listed in ascending order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import ClassVar, NamedTuple

from ..dependency import Action, B, ConfigError, F, I, Kind, Order, R, Spec, local_order
from ..system.files import read_file
from .plan import Plan, read_plan

_SOURCE = "torch.distributed.pipelining, _PipelineScheduleRuntime._load_csv"
_SKIPPED = "UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD|(?:WAIT_)?SEND_[FB]|RECV_[FB]"
_CELL = re.compile(rf"([0-9]{{1,9}})(F|I|B|W|{_SKIPPED})([0-9]{{0,9}})")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


#: actions by worker, in order
Rows = tuple[tuple[Action, ...], ...]
#: route -> stage -> worker
Placement = tuple[tuple[int, ...], ...]


class Program(NamedTuple):
    """The lists of a schedule."""

    rows: Rows
    placement: Placement
    #: microbatch -> route
    routes: tuple[int, ...]
    #: the I of every split backward
    split: frozenset[Action]
    #: stages that recompute
    recompute: frozenset[int]

    @classmethod
    def of(cls, rows: Rows, placement: Placement, routes: tuple[int, ...]) -> Program:
        """Return the program of these lists."""
        actions = [action for row in rows for action in row]
        split = frozenset(action for action in actions if action.kind is I)
        return cls(rows, placement, routes, split, frozenset(a.stage for a in actions if a.kind is R))


class ListedSchedule(Spec):
    """A searched program: its placement and order were found for a model's costs.

    With fewer microbatches, it runs the actions of the existing ones.
    """

    source = "rpc-pipe plan: local search"
    listed: ClassVar[Program]
    #: its name in errors
    label: ClassVar[str] = "the program"

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.listed
        if self.num_workers != len(listed.rows):
            raise ConfigError(f"workers {self.num_workers}: {self.label} is for {len(listed.rows)}")
        if self.num_microbatches > len(listed.routes):
            most = len(listed.routes)
            raise ConfigError(f"microbatches {self.num_microbatches}: {self.label} lists {most}; use at most those")

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
def listed_schedule(rows: Rows, placement: Placement, routes: tuple[int, ...]) -> type[ListedSchedule]:
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
        count = plan.num_microbatches
        raise ConfigError(f"plan: routes {list(routes)}: must name a route for each of {count} microbatches")
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


def export_csv(spec: Spec) -> str:
    """Return each worker's order as a row of torch's compute-only format, `0F0,0F1,1I0,1W0`.

    Torch derives sends and receives itself. Stages, ranks and microbatches keep their numbers.

    Raises:
        ConfigError: the format cannot express the schedule.
    """
    name = type(spec).__name__
    routes = {route for worker in spec.workers for _, route in spec.hosted(worker)}
    if len(routes) > 1:
        raise ConfigError(f"schedule {name}: has {len(routes)} replicas of each stage; torch's CSV has one")
    if not spec.synchronous:
        raise ConfigError(f"schedule {name}: overlaps steps; torch's CSV is one step")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for worker in range(spec.num_workers):
        order = [action for action in local_order(spec, worker) if action.kind.per_microbatch]
        if any(action.kind is R for action in order):
            raise ConfigError(f"schedule {name}: torch's CSV knows no recomputation; export gpipe or 1f1b")
        _check_expressible(spec, worker, order)
        rows.writerow(map(str, order))
    return text.getvalue()


def _check_expressible(spec: Spec, worker: int, order: Sequence[Action]) -> None:
    """Refuse orders that torch would read, and fail on in the middle of a step."""
    name = type(spec).__name__
    if not order:
        raise ConfigError(f"schedule {name}: worker {worker} holds no stage; each of torch's ranks needs one")
    last = [action.microbatch for action in order if action.kind is F and action.stage == spec.last_stage]
    if last != sorted(last):
        runs = f"stage {spec.last_stage} runs forwards in the order {last}"
        raise ConfigError(f"schedule {name}: {runs}; torch finds losses by their places, so there they must ascend")


@lru_cache(maxsize=16)
def import_csv(path: str) -> type[Spec]:
    """Return the schedule in a CSV file: placement, kinds and each worker's order are the file's.

    Raises:
        ConfigError: there is no such file, or a cell that is no action.
    """
    own = {"listed": _read(path), "label": path, "source": _SOURCE, "__doc__": f"Read from {path}."}
    return type("TorchCSV", (ListedSchedule,), own)


def _read(path: str) -> Program:
    text = read_file(Path(path), f"schedule {path}", "utf-8-sig")
    try:
        table = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ConfigError(f"schedule {path}: cannot be read: {error}") from error
    while table and not any(table[-1]):
        table.pop()  # blank lines at the end
    rows = tuple(tuple(_actions(path, number, row)) for number, row in enumerate(table))
    placement: dict[int, int] = {}
    for stage, worker in ((action.stage, worker) for worker, row in enumerate(rows) for action in row):
        if (other := placement.setdefault(stage, worker)) != worker:
            twice = f"row {other} and in row {worker}"
            raise ConfigError(f"schedule {path}: stage {stage} is in {twice}; a stage has one worker")
    missing = next(stage for stage in count() if stage not in placement)
    if missing <= max(placement, default=0):
        raise ConfigError(f"schedule {path}: no row has stage {missing}")
    places = tuple(placement[stage] for stage in range(len(placement)))
    actions = [action for row in rows for action in row]
    program = Program.of(rows, (places,), (0,) * (1 + max(action.microbatch for action in actions)))
    for action in actions:
        if action.kind is B and I(action.stage, action.microbatch) in program.split:
            raise ConfigError(f"schedule {path}: has {action} and its parts I and W; a backward is one or the other")
    return program


def _actions(path: str, row: int, cells: Iterable[str]) -> Iterator[Action]:
    """Yield the computations of a row. Transfers follow from data flow; sharding is not supported and skipped."""
    for column, cell in enumerate(cells):
        together = _OVERLAP.fullmatch(cell.strip())
        for part in map(str.strip, together[1].split(";") if together else [cell]):
            match = _CELL.fullmatch(part)
            computes = match is not None and match[2] in "FIBW"
            if part and (match is None or (computes and not match[3])):
                at = f"row {row}, cell {column}"
                raise ConfigError(f"schedule {path}: {at}: {part!r} is no action, such as 2F0, 1I3 or 1W3")
            if match and computes:
                yield Action(int(match[1]), Kind.of(match[2]), int(match[3]))
