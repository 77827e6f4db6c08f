"""What a script has been told so far, so that a script that starts anew is told it again without computing.

A script that knows nothing of checkpoints makes its calls from the first one on. Those that the checkpoint has behind
it are answered from here: the same losses in the same order, whatever else the script does between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dependency import ConfigError

_KINDS = ("step", "evaluate")


class Resumption:
    """Results of `step` and `evaluate`, in the order of the calls.

    Args:
        past: of the run that the checkpoint was made in; shape (calls, 2).
        batch: what the batch of its last training step is called, if it has a name.
    """

    def __init__(self, past: Tensor | None = None, batch: str = "") -> None:
        self._told: list[tuple[int, float]] = (
            [] if past is None else [(int(kind), loss) for kind, loss in past.tolist()]
        )
        self.batch = batch
        #: calls that are answered from the past: the next one, and the first that is not
        self._next = self._until = 0
        #: of these, the last training step
        self._last = -1

    def tensor(self) -> Tensor:
        """Return all results, (calls, 2): which call it was, and the loss."""
        return torch.tensor(self._told, dtype=torch.float64).reshape(-1, 2)

    def replay(self) -> None:
        """Answer the calls from the first one on."""
        self._next, self._until = 0, len(self._told)
        self._last = max((number for number, (kind, _) in enumerate(self._told) if kind == 0), default=-1)

    @property
    def behind(self) -> bool:
        """Whether the next call is answered from the past."""
        return self._next < self._until

    def answer(self, what: str, batch: str = "") -> float:
        """Return what this call was told when it was made.

        Args:
            batch: what the batch is called, if it has a name.

        Raises:
            ConfigError: the script makes other calls than it did, or has other data.
        """
        kind, loss = self._told[self._next]
        if _KINDS[kind] != what:
            raise ConfigError(
                f"--resume: call {self._next} of the script is {what}, and was {_KINDS[kind]} in the run that "
                "wrote the checkpoint; go on with the same script"
            )
        if self._next == self._last and batch != self.batch and batch and self.batch:
            raise ConfigError(
                f"--resume: the last step before the checkpoint was of {self.batch}, and is of {batch}: the data, "
                "their order or the rows of a batch have changed; go on with the same, or begin anew without --resume"
            )
        self._next += 1
        return loss

    def note(self, what: str, loss: float, batch: str = "") -> None:
        """Remember a result, and what the batch of a training step is called."""
        if what == "step":
            self.batch = batch
        self._told.append((_KINDS.index(what), loss))
