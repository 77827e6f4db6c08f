"""What a script has been told so far, so that a script that starts anew is told it again without computing.

A script that knows nothing of checkpoints makes its calls from the first one on. Those that the checkpoint has behind
it are answered from here: the same losses in the same order, whatever else the script does between them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..dependency import ConfigError

_KINDS = ("step", "evaluate")


class Resumption:
    """Results of `step` and `evaluate`, in the order of the calls.

    Args:
        past: of the run that the checkpoint was made in; shape (calls, 3).
        batch: what the batch of its last training step is called, if it has a name.

    Attributes:
        norm: of the gradients of the last training step, if it was asked for.
    """

    def __init__(self, past: Tensor | None = None, batch: str = "") -> None:
        told = [] if past is None else past.tolist()
        #: which call it was, loss, norm of the gradients or nan
        self._told: list[tuple[int, float, float]] = [(int(kind), loss, norm) for kind, loss, norm in told]
        self.batch = batch
        self.norm: float | None = None
        for kind, _, norm in self._told:
            self._note_norm(kind, norm)
        #: calls that are answered from the past: the next one, and the first that is not
        self._next = self._until = 0
        #: of these, the last training step
        self._last = -1

    def tensor(self) -> Tensor:
        """Return all results, (calls, 3): which call it was, the loss, and the norm of the gradients or nan."""
        return torch.tensor(self._told, dtype=torch.float64).reshape(-1, 3)

    def steps_done(self, now: int) -> int:
        """Return how many training steps the script has made, which are `now` when all calls have been answered."""
        return sum(kind == 0 for kind, *_ in self._told[: self._next]) if self.behind else now

    def _note_norm(self, kind: int, norm: float) -> None:
        if _KINDS[kind] == "step":
            self.norm = None if math.isnan(norm) else norm

    def replay(self) -> None:
        """Answer the calls from the first one on."""
        self.norm = None
        self._next, self._until = 0, len(self._told)
        self._last = max((number for number, (kind, *_) in enumerate(self._told) if kind == 0), default=-1)

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
        kind, loss, norm = self._told[self._next]
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
        self._note_norm(kind, norm)
        return loss

    def note(self, what: str, loss: float, batch: str = "", norm: float | None = None) -> None:
        """Remember a result, and of a training step what its batch is called and the norm of its gradients."""
        if what == "step":
            self.batch, self.norm = batch, norm
        self._told.append((_KINDS.index(what), loss, math.nan if norm is None else norm))
