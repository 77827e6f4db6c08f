"""rpc-pipe: pipeline-parallel training with a relation as the schedule, and workers that pull.

The names that scripts use stand here. Each is loaded when it is looked up: planning and the command line need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dependency import *  # noqa: F403
    from .pipeline import Pipeline, SplitBatch, Training
    from .planning.plan import Plan
    from .planning.simulator import Link, simulate
    from .step_report import StepReport
    from .workers.handlers import carries_out
    from .workers.hooks import Listener, StepRecord

__version__ = "0.2.0"
__all__ = [  # noqa: F405
    "B", "F", "G", "I", "R", "U", "W", "Action", "BatchError", "ConfigError", "DataError", "Disagreement", "Kind",
    "Link", "Listener", "ModelError", "Order", "PeerLost", "PipeError", "Pipeline", "Plan", "ScheduleError", "Spec",
    "SplitBatch", "Stalled", "StepRecord", "StepReport", "StorageError", "Training", "WorkerFailure", "carries_out",
    "check", "simulate",
]  # fmt: skip


#: where a name stands, if not in `dependency`
_PLACES = {
    **dict.fromkeys(("Pipeline", "SplitBatch", "Training"), ".pipeline"),
    "Plan": ".planning.plan",
    **dict.fromkeys(("Link", "simulate"), ".planning.simulator"),
    "StepReport": ".step_report",
    "carries_out": ".workers.handlers",
    **dict.fromkeys(("Listener", "StepRecord"), ".workers.hooks"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, ".dependency"), __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
