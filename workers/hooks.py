"""What a worker tells about itself while it runs: no-op hooks. No worker depends on a listener."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ..dependency import Action

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """One action as it ran. Times are `perf_counter_ns` of the worker."""

    action: Action
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker as it ran."""

    worker: int
    step: int
    start_ns: int
    end_ns: int
    actions: list[Record] = field(default_factory=list)

    @property
    def busy_ns(self) -> int:
        """Time spent computing."""
        return sum(record.end_ns - record.start_ns for record in self.actions)


class Listener:
    """Override what you want to hear. Called in the compute thread: be quick, never wait."""

    def action_started(self, step: int, action: Action) -> None:
        """An action is about to run."""

    def waiting(self, step: int, what: Callable[[], str]) -> None:
        """There is nothing to run until something arrives; `what()` says what is missing."""

    def step_finished(self, record: StepRecord) -> None:
        """A step is complete on this worker."""


class Listeners(Listener):
    """Tells several listeners; one that raises is reported once and removed, and the run goes on."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def action_started(self, step: int, action: Action) -> None:
        self._tell("action_started", step, action)

    def waiting(self, step: int, what: Callable[[], str]) -> None:
        self._tell("waiting", step, what)

    def step_finished(self, record: StepRecord) -> None:
        self._tell("step_finished", record)

    def _tell(self, hook: str, *args: object) -> None:
        for listener in tuple(self._listeners):
            try:
                getattr(listener, hook)(*args)
            except Exception:
                logger.exception("listener %r raised in %s and is removed", listener, hook)
                self._listeners.remove(listener)
