"""A worker's reports while it runs, and the hooks that receive them. No worker depends on a listener."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..dependency import Action, Pulled

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """One action as it ran. Times are `perf_counter_ns` of the worker."""

    action: Action
    start_ns: int
    end_ns: int


class Arrived(NamedTuple):
    """A payload that arrived from another worker."""

    action: Action
    #: the worker that made it
    peer: int
    num_bytes: int
    at_ns: int


class Blocked(NamedTuple):
    """The next action of a waiting worker, and the actions that it waits for."""

    #: None: all actions have run, and the result of the step is missing
    action: Action | None
    missing: list[Pulled]

    def __str__(self) -> str:
        if self.action is None:
            return "the result of the step"
        return ", ".join(f"{n.action} of worker {n.worker}" for n in self.missing) + f" to run {self.action}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker, as measured."""

    worker: int
    #: from 1
    step: int
    start_ns: int
    end_ns: int
    actions: list[Record] = field(default_factory=list)
    #: by time
    arrivals: list[Arrived] = field(default_factory=list)
    loss: float = float("nan")
    #: rows of the batch, and tokens if its inputs are whole numbers
    rows: int = 0
    tokens: int = 0
    #: peak memory so far, of the process or of the GPU
    peak_bytes: int = 0
    #: payloads that other workers have not pulled yet
    outbox: int = 0
    #: microbatches of the step
    num_microbatches: int = 0
    #: ns that the worker waited for the data loader, and the loader's work meanwhile: disk, network or decode
    data_wait_ns: int = 0
    data_cause: str = ""
    #: numbers of the microbatches as given, in the order of the run; empty: as given
    microbatch_order: tuple[int, ...] = ()
    #: whether `tokens` counts padding, which neither a mask nor labels show
    with_padding: bool = False
    #: norm of all gradients before clipping; None if it is not measured
    grad_norm: float | None = None
    #: learning rate of the next update, of the first parameter group here; None if nothing here is trained
    learning_rate: float | None = None
    #: forwards of a whole model that this worker has observed so far, and the ns that this took
    observations: int = 0
    observed_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """Time spent computing."""
        return sum(end - start for action, start, end in self.actions if action.kind.resource == "compute")


class Listener:
    """Override the events you want. Called in the compute thread: be quick, never wait. Steps count from 1."""

    def action_started(self, step: int, action: Action) -> None:
        """An action is about to run."""

    def waiting(self, step: int, what: Callable[[], Blocked]) -> None:
        """Nothing can run until a payload arrives; `what()` returns the missing ones."""

    def step_finished(self, record: StepRecord) -> None:
        """A step is complete on this worker."""

    def evaluated(self, step: int, loss: float) -> None:
        """An evaluation after `step` training steps has given `loss`; of a loader, the mean of its batches."""

    def idle(self, step: int) -> None:
        """A training step, an evaluation or a prediction is over; `step` training steps are done."""


class Listeners:
    """Calls several listeners; one that raises is reported once and removed, and the run continues."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> None:
        self._listeners = (*self._listeners, listener)

    def tell(self, hook: str, *args: object) -> None:
        """Call a method of all, by its name."""
        for listener in self._listeners:
            try:
                getattr(listener, hook)(*args)
            except Exception:
                logger.exception("listener %r raised in %s and is removed", listener, hook)
                self._listeners = tuple(other for other in self._listeners if other is not listener)
