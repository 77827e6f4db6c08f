"""Pure theory of pipeline schedules: actions, relation, checks. Standard library only."""

from .action import RESOURCES, Action, Entry, Kind, Milestone, Pulled, Resource
from .check import check, check_all, schedule_errors
from .declared import Order

from .errors import (  # isort: skip
    BatchError, ConfigError, Damaged, DataError, Disagreement, EpochEnds, Malformed, ModelError, NotFinite, NotMet,
    PeerLost, PipeError, ScheduleError, StageLost, Stalled, StorageError, WorkerFailure, ends_epoch, refuse_below,
)  # fmt: skip
from .action import A, B, C, D, F, G, H, I, N, P, R, S, T, U, V, W
from .order import local_order
from .program import Part, entries, order_limit
from .reductions import NO_REDUCTIONS, Reductions, reduction_tree
from .spec import Spec
from .versions import known_reductions, microbatches_of, microbatches_on, update_of, updates_a_step

__all__ = [
    "A", "N", "NO_REDUCTIONS", "P", "RESOURCES", "S", "Action", "Reductions", "B", "BatchError", "C", "ConfigError",
    "Damaged", "DataError", "D", "Disagreement", "Entry", "F", "G", "H", "I", "Kind", "Malformed", "Milestone", "Order",
    "Part", "ModelError", "NotFinite", "NotMet", "PeerLost", "PipeError", "Pulled", "R", "Resource", "ScheduleError",
    "Spec", "Stalled", "StorageError", "T", "U", "V", "W", "WorkerFailure", "known_reductions", "schedule_errors",
    "check", "check_all", "reduction_tree", "entries", "local_order", "microbatches_of", "microbatches_on",
    "order_limit", "refuse_below", "update_of", "updates_a_step", "EpochEnds", "StageLost",
    "ends_epoch",
]  # fmt: skip
