"""Pure theory of pipeline schedules: actions, relation, checks. Standard library only."""

from .action import RESOURCES, Action, Kind, Resource
from .answers import schedule_errors
from .check import check, check_all
from .entry import Entry, Pulled
from .errors import (
    ConfigError,
    Damaged,
    DataError,
    Disagreement,
    NotFinite,
    NotMet,
    PeerLost,
    PipeError,
    ScheduleError,
    Stalled,
    StorageError,
    WorkerFailure,
    refuse_below,
)
from .kinds import B, C, D, F, G, I, N, R, T, U, V, W
from .order import local_order
from .part import Part
from .program import entries, order_limit
from .recomputing import recomputing
from .reductions import NO_REDUCTIONS, Reductions, reduction_tree
from .replicating import replicated
from .spec import Order, Spec
from .versions import (
    known_reductions,
    microbatches_of,
    microbatches_on,
    most_open,
    period,
    reaches,
    staleness,
    takes_steps,
    update_of,
    updates_a_step,
    weight_copies,
    worker_staleness,
    worker_weight_copies,
)

__all__ = [
    "N",
    "NO_REDUCTIONS",
    "RESOURCES",
    "Action",
    "Reductions",
    "B",
    "C",
    "ConfigError",
    "Damaged",
    "DataError",
    "D",
    "Disagreement",
    "Entry",
    "F",
    "G",
    "I",
    "Kind",
    "Order",
    "Part",
    "NotFinite",
    "NotMet",
    "PeerLost",
    "PipeError",
    "Pulled",
    "R",
    "Resource",
    "ScheduleError",
    "Spec",
    "Stalled",
    "StorageError",
    "T",
    "U",
    "V",
    "W",
    "WorkerFailure",
    "known_reductions",
    "schedule_errors",
    "check",
    "check_all",
    "worker_weight_copies",
    "reduction_tree",
    "entries",
    "local_order",
    "microbatches_of",
    "microbatches_on",
    "most_open",
    "order_limit",
    "period",
    "reaches",
    "refuse_below",
    "recomputing",
    "replicated",
    "worker_staleness",
    "staleness",
    "takes_steps",
    "update_of",
    "updates_a_step",
    "weight_copies",
]
