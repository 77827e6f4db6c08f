"""Reports of training steps for a script, TensorBoard or wandb."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .workers.hooks import Listener, StepRecord


class StepReport(NamedTuple):
    """A training step; TensorBoard and wandb take `report._asdict()`."""

    #: training steps done, this one too
    step: int
    loss: float
    #: before clipping; None if it is not measured
    grad_norm: float | None
    #: of the next update
    learning_rate: float | None
    #: from the end of the step before to the end of this one
    step_ms: float
    #: of that, how long a worker of this process did not compute, on average
    lost_ms: float
    rows_per_s: float
    #: without padding where a mask or labels show it; 0.0 if the batch has no whole numbers
    tokens_per_s: float
    #: peak memory so far, of this process or of its GPU
    peak_bytes: int


class _LastSteps(Listener):
    def __init__(self) -> None:
        self.ended_ns, self.record = 0, StepRecord(0, 0, 0, 0)

    def step_finished(self, record: StepRecord) -> None:
        self.ended_ns, self.record = self.record.end_ns or record.start_ns, record


class StepReports:
    """Calls functions of the user with a report after each step of a `Pipeline`."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._workers: list[_LastSteps] = []
        self._functions: list[Callable[[StepReport], object]] = []
        pipe.listen(self._listener)

    def add(self, function: Callable[[StepReport], object]) -> None:
        """Let `function` be called from the next step on."""
        self._functions.append(function)

    def tell(self, loss: float) -> None:
        """Call the functions: a step with this loss has ended on all workers."""
        records = [worker.record for worker in self._workers]
        took_ns = max(worker.record.end_ns - worker.ended_ns for worker in self._workers)
        busy_ns = sum(record.busy_ns for record in records) / len(records)
        rows, tokens = (max(getattr(record, what) for record in records) for what in ("rows", "tokens"))
        now = self._pipe.steps_done, loss, self._pipe.grad_norm, self._pipe.learning_rate, took_ns / 1e6
        rates = max(0.0, took_ns - busy_ns) / 1e6, 1e9 * rows / took_ns, 1e9 * tokens / took_ns
        report = StepReport(*now, *rates, max(record.peak_bytes for record in records))
        for function in self._functions:
            function(report)

    def _listener(self, worker: int) -> _LastSteps:
        self._workers.append(_LastSteps())
        return self._workers[-1]
