"""Pure theory of pipeline schedules: actions, relation, checks. Standard library only."""

from .action import Action, B, F, I, Kind, U, W
from .check import check, check_all
from .errors import ConfigError, PeerLost, PipeError, ScheduleError, Stalled, WorkerFailure
from .order import local_order
from .program import Entry, Pulled, entries
from .spec import ENDLESS, Order, Spec

__all__ = [
    "ENDLESS",
    "Action",
    "B",
    "ConfigError",
    "Entry",
    "F",
    "I",
    "Kind",
    "Order",
    "PeerLost",
    "PipeError",
    "Pulled",
    "ScheduleError",
    "Spec",
    "Stalled",
    "U",
    "W",
    "WorkerFailure",
    "check",
    "check_all",
    "entries",
    "local_order",
]
