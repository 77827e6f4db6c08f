"""rpc-pipe: pipeline-parallel training in which a schedule is a relation and workers pull.

What a script needs stands here and is loaded when it is looked up: planning and the command line do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dependency import (
        Action,
        B,
        ConfigError,
        DataError,
        Disagreement,
        F,
        G,
        I,
        Kind,
        Order,
        PeerLost,
        PipeError,
        R,
        ScheduleError,
        Spec,
        Stalled,
        StorageError,
        U,
        W,
        WorkerFailure,
    )
    from .pipeline import Pipeline

__version__ = "0.1.0"
__all__ = [
    "Action",
    "B",
    "ConfigError",
    "DataError",
    "Disagreement",
    "F",
    "G",
    "I",
    "Kind",
    "Order",
    "PeerLost",
    "PipeError",
    "Pipeline",
    "R",
    "ScheduleError",
    "Spec",
    "Stalled",
    "StorageError",
    "U",
    "W",
    "WorkerFailure",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(".pipeline" if name == "Pipeline" else ".dependency", __name__)
    except AttributeError as error:  # from here it would say only that there is no such name
        raise ImportError(f"{name} cannot be loaded from {__name__}: {error}") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
