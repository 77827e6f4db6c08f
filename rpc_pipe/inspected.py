"""The part of a `Pipeline` that shows its training, and changes it after a step, or between backward and update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from .dependency import ConfigError, Entry
from .session import Session
from .workers.hooks import Listener

if TYPE_CHECKING:
    from .step_report import StepReport, StepReports


class Optimizers(list[Optimizer]):
    """The optimizers of a process."""

    def values(self) -> list[list[Optimizer]]:
        """Return lists of them, as scripts of version 0.1 walk them."""
        return [[each] for each in self]


class Inspected:
    """The training of a `Pipeline`, to be watched and changed by a script."""

    _session: Session
    #: milliseconds of a training step by the plan; 0.0 without a plan
    predicted_ms: float = 0.0
    #: None: no function of the user is called after a step
    _reports: StepReports | None = None

    def listen(self, listener: Callable[[int], Listener]) -> None:
        """Add `listener(worker)` to every worker of this process."""
        if not callable(listener):
            raise ConfigError(f"listener {listener!r}: must be callable as listener(worker), and return a Listener")
        for actor in self._session.actors:
            actor.listeners.add(listener(actor.worker))

    def on_step(self, function: Callable[[StepReport], object]) -> None:
        """Call `function(report)` after each training step, in every process, before the step's loss is returned.

        `step` and `train` raise its error, after the update.
        """
        if not callable(function):
            raise ConfigError(f"on_step {function!r}: must be a function of one report")
        if self._reports is None:
            from .step_report import StepReports

            self._reports = StepReports(self)
        self._reports.add(function)

    def on_gradients(self, stage: int, function: Callable[[Mapping[str, nn.Parameter]], object]) -> None:
        """Call `function(parameters)` between backward and update, from the next step on, where the stage is.

        It gets the stage's parameters by their names in the unsplit model. Each `grad` is that of the whole batch, of
        all replicas and of all stages that share it, unscaled and not yet clipped; it may be read and changed. With
        `accumulate` it is called once an update. By an asynchronous schedule the norm of all is measured before.

        Raises:
            ConfigError: there is no such stage.
        """
        from .modifying import call_on_gradients

        call_on_gradients(self._session, stage, function)

    def modify(self, function: Callable[[int, list[nn.Module]], object], *, summed: str | Collection[str] = ()) -> None:
        """Call `function(stage, modules)` for each stage of each worker, between two steps, to change the modules.

        All workers call this alike.

        Args:
            function: gets all modules of the stage, with those inside of them.
            summed: names of modules' buffers to sum over the replicas first, such as an expert's count of tokens.
                `function` finds the sum in each replica, and sets it to 0 for the next step.

        Raises:
            ConfigError: it raised something on another worker; on that one this is raised as it is. Or no module has
                such a buffer.
        """
        from .modifying import modify  # few scripts change modules

        if not callable(function):
            raise ConfigError(f"modify {function!r}: takes a function of a stage and its modules")
        modify(self._session, function, {summed} if isinstance(summed, str) else set(summed))

    @property
    def replaying(self) -> bool:
        """Whether steps of a resumed script are skipped until it reaches its checkpoint.

        Until then `step` and `evaluate` return nan and `predict` returns None; the checkpoint's last step returns its
        loss. In the body of a loop `if pipe.replaying: continue` leaves out code that depends on numbers.
        """
        return self._session.results.behind

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next update, of the first parameter group here; None: nothing here is trained.

        To set it sets that of every group of this process's stages: all workers do so alike, between two steps.
        """
        return next((actor.learning_rate for actor in self._session.actors if actor.learning_rate is not None), None)

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if not (isinstance(rate, (int, float, Tensor)) and rate >= 0):
            raise ConfigError(f"learning_rate {rate!r}: must be a number of at least 0")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    @property
    def optimizers(self) -> Optimizers:
        """The optimizers of this process, by stage and replica; a stage that trains nothing has none.

        The names of parameters are in their groups (`param_names`). `values()` are lists of one each.
        """
        shards = {key: shard for actor in self._session.actors for key, shard in actor.shards.items()}
        found = [shard.optimizer for _, shard in sorted(shards.items()) if not shard.is_guest]
        return Optimizers(each for each in found if each is not None)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; 1 without `grad_scaler`."""
        return next(iter(self._session.actors[0].shards.values())).updating.scale.scale

    def program(self, worker: int, num_microbatches: int) -> list[Entry]:
        """Return the entries of `worker` in a training step of `num_microbatches` microbatches."""
        return self._session.program(worker, num_microbatches)

    def shards(self, worker: int) -> list[tuple[int, int, int]]:
        """Return (stage, route, number of layers) of every shard that `worker` holds."""
        spec, ranges = self._session.spec, self._session.partition.ranges
        return [(stage, route, len(ranges[stage])) for stage, route in spec.hosted(worker)]
