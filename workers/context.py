"""The state that the parts of a worker share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..dependency.pipeline_options import Options
from .compute.devices.device import DeviceBackend
from .compute.shard import Shard
from .hooks import Listeners
from .mailbox import Mailbox
from .transport.payload import Payload

if TYPE_CHECKING:
    from .compute.parts.members import Members


@dataclass(eq=False)
class Context:
    """A worker's shards, connections and settings, and its running action."""

    worker: int
    backend: DeviceBackend
    mailbox: Mailbox
    #: by (stage, route)
    shards: dict[tuple[int, int], Shard]
    #: the gradients of the whole model are clipped to this norm; None: no clipping
    max_grad_norm: float | None = None
    #: of the pipeline
    options: Options = field(default_factory=Options)
    #: reaction to a loss that is not finite: "stop", "warn" or "ignore"
    nan: str = "stop"
    listeners: Listeners = field(default_factory=Listeners)
    #: whether training can continue after a failed step: if all workers are threads of one process
    recovers: bool = False
    #: the processes that are this worker together; None: this one alone
    members: Members | None = None
    #: training steps that are complete, and that have begun
    step: int = 0
    next_step: int = 0
    #: evaluations and predictions that are complete
    evaluated: int = 0
    #: the action that runs now, such as `2B3`, and its step, for error messages
    running: str = ""
    running_step: int = 1
    #: the payload that it computes from
    given: Payload | None = None
    #: set by signal handlers or the caller; all workers then stop after the same step (see Result.stop)
    stop_requested: bool = False
    #: set by the launcher of an elastic job; all workers then rest after the same step (see Result.rest)
    rest_requested: bool = False

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next update, of the first parameter group here; None: nothing here is trained."""
        optimizers = (shard.optimizer for shard in self.shards.values() if shard.optimizer is not None)
        return next((float(g["lr"]) for each in optimizers for g in each.param_groups if "lr" in g), None)
