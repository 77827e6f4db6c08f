"""Pure theory of pipeline schedules: actions, relation, checks. Standard library only."""

from .action import ACCUMULATING, PER_REPLICA, Action, B, F, G, I, Kind, R, U, W
from .answers import blaming
from .check import check, check_all
from .errors import ConfigError, Disagreement, PeerLost, PipeError, ScheduleError, Stalled, WorkerFailure
from .order import local_order
from .program import Entry, Pulled, entries, order_limit
from .spec import ENDLESS, Order, Spec

__all__ = [
    "ACCUMULATING",
    "ENDLESS",
    "PER_REPLICA",
    "Action",
    "B",
    "ConfigError",
    "Disagreement",
    "Entry",
    "F",
    "G",
    "I",
    "Kind",
    "Order",
    "PeerLost",
    "PipeError",
    "Pulled",
    "R",
    "ScheduleError",
    "Spec",
    "Stalled",
    "U",
    "W",
    "WorkerFailure",
    "blaming",
    "check",
    "check_all",
    "entries",
    "local_order",
    "order_limit",
]
