"""What the parts of a worker share while it computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .compute.device import Courier
from .compute.shard import Shard
from .hooks import Listeners
from .mailbox import Mailbox
from .transport.payload import Payload


@dataclass(eq=False)
class Context:
    """A worker's own things."""

    worker: int
    courier: Courier
    mailbox: Mailbox
    #: by (stage, route)
    shards: dict[tuple[int, int], Shard]
    #: norm to which the gradients of the whole model are clipped; None: they are not
    max_grad_norm: float | None = None
    #: what is done about a loss that is not finite: stop, warn or ignore
    nan: str = "stop"
    listeners: Listeners = field(default_factory=Listeners)
    #: whether it goes on after a failure, as where all workers are in one process
    goes_on: bool = False
    #: training steps done, and begun
    step: int = 0
    next_step: int = 0
    #: evaluations and predictions done
    num_evaluated: int = 0
    #: what runs now, such as `2B3`, and in which step, for reports
    running: str = ""
    running_step: int = 0
    #: what that computes from
    given: Payload | None = None
    #: set from anywhere; all workers then stop after the same step (see Result.stop)
    stop_requested: bool = False
