"""A script that knows nothing of checkpoints starts from the top: its calls that a checkpoint covers are skipped.

A checkpoint keeps the number of its training steps and the results of the last ones, so its size does not grow.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..dependency import ConfigError

if TYPE_CHECKING:
    from .newcomer import Repetition

logger = logging.getLogger(__name__)


class Skipped(float):
    """The value of an evaluation that is skipped: nan, also by any name of a metric."""

    def __getitem__(self, name: str) -> float:
        return math.nan

    def keys(self) -> tuple[str, ...]:
        """Return no name: which ones a metric has is not known."""
        return ()

    items = values = keys


class Resumption:
    """The last results of a run, and which calls of a script that starts from the top are skipped.

    Args:
        about: of the run that the checkpoint was made in, as `about` gives it.

    Attributes:
        batch: name of the batch of the last training step, if it has one.
        loss: of the last training step.
        norm: of the gradients of the last training step, if it was asked for.
        stopped: whether the last skipped step was the last of all.
        averaged: whether weights and their averages are exchanged now.
        repetition: gives the results of a job that this process comes to, until it takes part.
    """

    stopped = False
    repetition: Repetition | None = None

    def __init__(self, about: Mapping[str, Any] = {}) -> None:
        self.averaged = False
        self.batch, self.loss = str(about.get("batch", "")), float(about.get("loss", math.nan))
        #: of the run's first batch; 0: not known
        self.rows = int(about.get("rows", 0))
        norm = about.get("norm")
        self.norm = None if norm is None else float(norm)
        #: training steps that are skipped, and how many the script has asked for
        self._covered = self._asked = 0

    def restore(self, results: Resumption) -> None:
        """Go on with the results of a checkpoint."""
        vars(self).update(vars(results))

    @property
    def about(self) -> dict[str, Any]:
        """The values of this that a checkpoint keeps."""
        return {"batch": self.batch, "loss": self.loss, "norm": self.norm, "rows": self.rows}

    def skip(self, steps: int) -> None:
        """Skip calls until the script has made a number of training steps."""
        self._covered, self._asked = steps, 0

    @property
    def behind(self) -> bool:
        """Whether the script has not reached the checkpoint yet."""
        return self._asked < self._covered if self.repetition is None else self.repetition.goes_on

    def steps_done(self, now: int) -> int:
        """Return how many training steps the script has asked for, which are `now` when none is skipped any more."""
        return self._asked if self.behind else now

    def skip_step(self, batch: str, rows: int = 0) -> float:
        """Skip a training step; return the loss for the checkpoint's last step, and nan for any step before.

        Args:
            batch: name of the batch, if it has one.
            rows: of the batch; 0: not known. The checkpoint's first batch had `self.rows`.

        Raises:
            ConfigError: it is the checkpoint's last step, and had another batch.
        """
        if not self._asked and rows and self.rows not in (0, rows):
            logger.warning("the first batch has %d rows, and had %d in the run before", rows, self.rows)
        self._asked += 1
        if self.repetition is not None:
            loss, norm = self.repetition.step(self._asked)
            self.note_step(loss, batch, norm, rows)
            self.repetition.wait()
            return loss
        if not self.behind and batch != self.batch and batch and self.batch:
            raise ConfigError(
                f"--resume: the last step before the checkpoint was of {self.batch}, and is of {batch}; continue with "
                "the same data, order and rows, or start again without --resume"
            )
        return math.nan if self.behind else self.loss

    def evaluated(self) -> dict[str, tuple[float, float]]:
        """Return the value of an evaluation that is skipped, and its weight, by the name of a metric."""
        found = None if self.repetition is None else self.repetition.evaluated()
        return {"": (math.nan, 1.0)} if found is None else found

    def refuse_averaged(self, what: str) -> None:
        """Raise if the weights are their average: training, or a checkpoint, would continue from it."""
        if self.averaged:
            raise ConfigError(f"{what}: the weights are their average here; call it outside of `averaged`")

    def note_step(self, loss: float, batch: str, norm: float | None, rows: int) -> None:
        """Remember the result of a training step."""
        self.loss, self.batch, self.norm, self.rows = loss, batch, norm, self.rows or rows
