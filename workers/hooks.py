"""What a worker tells about itself while it runs: no-op hooks. No worker depends on a listener."""

from __future__ import annotations

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
    """A payload that another worker had made for an action of this one."""

    action: Action
    #: who made it
    peer: int
    num_bytes: int
    at_ns: int


class LayerTime(NamedTuple):
    """How long one layer's forward of one microbatch took."""

    #: equal for layers that say the same of themselves and get inputs of the same shapes: they should take as long
    kind: int
    ns: int


class Blocked(NamedTuple):
    """What a worker cannot run yet, and what that waits for."""

    #: None: all has run, and the step's result is missing
    action: Action | None
    missing: list[Pulled]

    def __str__(self) -> str:
        if self.action is None:
            return "the result of the step"
        return ", ".join(f"{n.action} of worker {n.worker}" for n in self.missing) + f" to run {self.action}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker as it ran."""

    worker: int
    step: int
    start_ns: int
    end_ns: int
    actions: list[Record] = field(default_factory=list)
    #: by time
    arrivals: list[Arrived] = field(default_factory=list)
    #: by layer of the worker's shards in order; empty where the device runs behind the host
    layers: list[LayerTime] = field(default_factory=list)
    loss: float = float("nan")
    #: rows of the batch, and tokens if its inputs are whole numbers
    rows: int = 0
    tokens: int = 0
    #: most memory ever held: of the process, or of the GPU
    peak_bytes: int = 0
    #: payloads that others have not taken yet
    outbox: int = 0
    #: of the step, on all workers
    num_microbatches: int = 0
    #: how long reading the batch held the worker up, and what it was busy with: disk, network or decode
    data_wait_ns: int = 0
    data_cause: str = ""

    @property
    def busy_ns(self) -> int:
        """Time spent computing."""
        return sum(end - start for action, start, end in self.actions if action.kind.resource == "compute")


class Listener:
    """Override what you want to hear. Called in the compute thread: be quick, never wait."""

    def action_started(self, step: int, action: Action) -> None:
        """An action is about to run."""

    def waiting(self, step: int, what: Callable[[], Blocked]) -> None:
        """There is nothing to run until something arrives; `what()` says what is missing."""

    def step_finished(self, record: StepRecord) -> None:
        """A step is complete on this worker."""

    def idle(self, step: int) -> None:
        """What the worker was asked to do is done, be it a training step, an evaluation or a prediction."""


class Listeners(Listener):
    """Tells several listeners; one that raises is reported once and removed, and the run goes on."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def add(self, listener: Listener) -> None:
        self._listeners = (*self._listeners, listener)

    def action_started(self, step: int, action: Action) -> None:
        for listener in self._listeners:  # as `_tell` does: this is told most often
            try:
                listener.action_started(step, action)
            except Exception:
                self._remove(listener, "action_started")

    def waiting(self, step: int, what: Callable[[], Blocked]) -> None:
        for listener in self._listeners:  # as `action_started`
            try:
                listener.waiting(step, what)
            except Exception:
                self._remove(listener, "waiting")

    def step_finished(self, record: StepRecord) -> None:
        self._tell("step_finished", record)

    def idle(self, step: int) -> None:
        self._tell("idle", step)

    def _tell(self, hook: str, *args: object) -> None:
        for listener in self._listeners:
            try:
                getattr(listener, hook)(*args)
            except Exception:
                self._remove(listener, hook)

    def _remove(self, listener: Listener, hook: str) -> None:
        logger.exception("listener %r raised in %s and is removed", listener, hook)
        self._listeners = tuple(other for other in self._listeners if other is not listener)
