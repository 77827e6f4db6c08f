"""What a script is told of training, and where it may step in: after each step, between backward and update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from .checkpoints.collective import together
from .checkpoints.facade import Checkpoints
from .dependency import ConfigError
from .own_workers import set_rate, sum_buffers
from .session import Session
from .workers.actor import WorkerActor
from .workers.hooks import Listener, StepRecord


class StepReport(NamedTuple):
    """A training step; `report._asdict()` is what TensorBoard and wandb take."""

    #: training steps done, this one too
    step: int
    loss: float
    #: before clipping; None without `max_grad_norm` or `log_grad_norm`
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

    def add(self, function: Callable[[StepReport], object]) -> None:
        """Let `function` be called from the next step on."""
        if not self._functions:
            self._pipe.listen(self._listener)
        self._functions.append(function)

    def tell(self, loss: float) -> None:
        """Call the functions: a step with this loss has ended on all workers."""
        if not self._functions:
            return
        records = [worker.record for worker in self._workers]
        took_ns = max(worker.record.end_ns - worker.ended_ns for worker in self._workers)
        busy_ns = sum(record.busy_ns for record in records) / len(records)
        rows, tokens = (max(getattr(record, what) for record in records) for what in ("rows", "tokens"))
        report = StepReport(
            self._pipe.steps_done,
            loss,
            self._pipe.grad_norm,
            self._pipe.learning_rate,
            took_ns / 1e6,
            max(0.0, took_ns - busy_ns) / 1e6,
            1e9 * rows / took_ns,
            1e9 * tokens / took_ns,
            max(record.peak_bytes for record in records),
        )
        for function in self._functions:
            function(report)

    def _listener(self, worker: int) -> _LastSteps:
        self._workers.append(_LastSteps())
        return self._workers[-1]


class Inspected:
    """The part of a `Pipeline` by which others look into its training."""

    _session: Session
    _reports: StepReports
    checkpoints: Checkpoints

    def listen(self, listener: Callable[[int], Listener]) -> None:
        """Add `listener(worker)` to every worker of this process."""
        if not callable(listener):
            raise ConfigError(f"listener {listener!r}: must be callable as listener(worker), and return a Listener")
        for actor in self._session.actors:
            actor.listeners.add(listener(actor.worker))

    def on_step(self, function: Callable[[StepReport], object]) -> None:
        """Call `function(report)` after each training step, in every process, before the step's loss is returned.

        What it raises is raised by `step` and `train`, after the update.
        """
        if not callable(function):
            raise ConfigError(f"on_step {function!r}: must be a function of one report")
        self._reports.add(function)

    def on_gradients(self, stage: int, function: Callable[[Mapping[str, nn.Parameter]], object]) -> None:
        """Call `function(parameters)` between backward and update, from the next step on, where the stage is.

        It gets the stage's parameters by their names in the unsplit model. Each `grad` is that of the whole batch, of
        all replicas and of all stages that share it, unscaled and not yet clipped; it may be read and changed. With
        `accumulate` it is called once an update. By an asynchronous schedule the norm of all is measured before.

        Raises:
            ConfigError: there is no such stage.
        """
        if stage not in range(self._session.spec.num_stages) or not callable(function):
            most = self._session.spec.num_stages - 1
            raise ConfigError(f"on_gradients {stage!r}, {function!r}: takes a stage from 0 to {most}, and a function")

        def add(actor: WorkerActor) -> None:
            for (each, _), shard in actor.shards.items():
                if each == stage and not shard.is_guest:
                    shard.updating.on_gradients.append(function)

        self._session.each(add)

    def modify(self, function: Callable[[int, list[nn.Module]], object], *, summed: str | Collection[str] = ()) -> None:
        """Call `function(stage, modules)` for each stage of each worker, between two steps, to change what is in them.

        All workers call this alike.

        Args:
            function: gets all modules of the stage, with those inside of them.
            summed: names of modules' buffers that are summed over the replicas before, such as an expert's count of
                tokens: `function` finds the sum in each replica, and sets it to 0 for the next step.

        Raises:
            ConfigError: it raised something on another worker; on that one this is raised as it is. Or no module has
                such a buffer.
        """
        if names := {summed} if isinstance(summed, str) else set(summed):
            self._session.each(lambda actor: sum_buffers(actor, names, self._session.spec.num_routes))

        changed: set[WorkerActor] = set()

        def change(actor: WorkerActor) -> None:
            # Once, even if the call is made again because another worker has died.
            for (stage, _), shard in actor.shards.items() if actor not in changed else ():
                if not shard.is_guest:
                    function(stage, shard.slice.modules)
            changed.add(actor)

        self._session.each(lambda actor: together(actor, "modify", partial(change, actor)))

    @property
    def replaying(self) -> bool:
        """Whether steps of a resumed script are skipped until it comes to its checkpoint.

        Until then `step` and `evaluate` return nan and `predict` returns None; the checkpoint's last step returns its
        loss. In the body of a loop `if pipe.replaying: continue` leaves out what depends on numbers.
        """
        return self.checkpoints.results.behind

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next update, of the first parameter group here; None: nothing here is trained.

        To set it sets that of every group of this process's stages: all workers do so alike, between two steps.
        """
        return next((actor.learning_rate for actor in self._session.actors if actor.learning_rate is not None), None)

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        set_rate(self._session.actors, rate)

    @property
    def optimizers(self) -> dict[int, list[Optimizer]]:
        """The optimizers of this process by stage, one for each replica here; stages that train nothing have none."""
        found: dict[int, list[Optimizer]] = {}
        for actor in self._session.actors:
            for (stage, _), shard in actor.shards.items():
                if shard.optimizer is not None and not shard.is_guest:
                    found.setdefault(stage, []).append(shard.optimizer)
        return found

    @property
    def loss_scale(self) -> float:
        """What the loss is scaled with; 1 without `grad_scaler`."""
        return next(iter(self._session.actors[0].shards.values())).updating.scale.scale
