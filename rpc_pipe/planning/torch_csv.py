"""Export and import of the CSV format of `torch.distributed.pipelining`, a row of actions a rank, of torch 2.6 to 2.15.

An exported schedule runs there over NCCL (`_PipelineScheduleRuntime`, in torchtitan `pipeline_parallel_schedule_csv`);
a file is imported as a `Spec`. Loads without torch.

Since 2.7 torch reads from the file which rank holds a stage; 2.6 needs `stage_index_to_group_rank` for any placement
but stage modulo ranks. A rank's stages must be listed in ascending order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

from ..dependency import Action, B, ConfigError, F, I, Kind, R, Spec, local_order
from ..system.files import read_file
from .listed_schedule import ListedSchedule, Program

_SOURCE = "torch.distributed.pipelining, _PipelineScheduleRuntime._load_csv"
_SKIPPED = "UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD|(?:WAIT_)?SEND_[FB]|RECV_[FB]"
_CELL = re.compile(rf"([0-9]{{1,9}})(F|I|B|W|{_SKIPPED})([0-9]{{0,9}})")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def export_csv(spec: Spec) -> str:
    """Return each worker's order as a row of torch's compute-only format, `0F0,0F1,1I0,1W0`.

    Torch derives sends and receives itself. Stages, ranks and microbatches keep their numbers.

    Raises:
        ConfigError: the format cannot express the schedule.
    """
    name = type(spec).__name__
    if spec.num_routes > 1:
        raise ConfigError(f"schedule {name}: has {spec.num_routes} replicas of each stage; torch's CSV has one")
    if not spec.synchronous:
        raise ConfigError(f"schedule {name}: overlaps steps; torch's CSV is one step")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for worker in range(spec.num_workers):
        order = [action for action in local_order(spec, worker) if action.kind.per_microbatch]
        if any(action.kind is R for action in order):
            raise ConfigError(
                f"schedule {name}: recomputes by actions of their own, which torch's CSV does not know; "
                "export gpipe or 1f1b and wrap the stages in torch.utils.checkpoint"
            )
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
        raise ConfigError(
            f"schedule {name}: stage {spec.last_stage} runs the forwards of microbatches in the order {last}; "
            "torch finds a loss by its place in that order, so there they must ascend"
        )


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
    for worker, row in enumerate(rows):
        for action in row:
            if placement.setdefault(action.stage, worker) != worker:
                raise ConfigError(
                    f"schedule {path}: stage {action.stage} is in row {placement[action.stage]} and in row {worker}; "
                    "a stage belongs to one worker"
                )
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
                raise ConfigError(
                    f"schedule {path}: row {row}, cell {column}: {part!r} is no action, such as 2F0, 1I3 or 1W3"
                )
            if match and computes:
                yield Action(int(match[1]), Kind.of(match[2]), int(match[3]))
