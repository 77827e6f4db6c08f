"""What a script has been told so far, so that a script that starts anew is told it again without computing.

A script that knows nothing of checkpoints makes its calls from the first one on. Those that the checkpoint has behind
it are answered from here: the same losses in the same order, whatever else the script does between them.
"""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Mapping
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from ..dependency import ConfigError

_KINDS = ("step", "evaluate")
_MOST_COLUMNS = 3


class Resumption:
    """Results of `step` and `evaluate`, in the order of the calls.

    Args:
        past: of the run that the checkpoint was made in, as `tensor` gives it.
        about: of the same run, as `about` gives it.

    Attributes:
        batch: what the batch of the last training step is called, if it has a name.
        norm: of the gradients of the last training step, if it was asked for.

    Raises:
        ValueError: no run can have had such a past.
    """

    def __init__(self, past: Tensor | None = None, about: Mapping[str, Any] = {}) -> None:
        #: of each call: which it was, the loss, the norm of the gradients or nan; a run may make millions
        self._kinds, self._losses, self._norms = bytearray(), array("d"), array("d")
        self.batch = str(about.get("batch", ""))
        self.norm: float | None = None
        if past is not None:
            calls = about.get("calls", len(past))
            if not 0 <= calls <= len(past):
                raise ValueError(f"{calls} calls, but {len(past)} rows of results")
            self._remember(past[:calls])
        #: calls that are answered from the past: the next one, and the first that is not
        self._next = self._until = 0
        #: of these, the last training step
        self._last = -1
        self._warned = False

    def _remember(self, past: Tensor) -> None:
        calls, columns = past.shape
        if not 1 <= columns <= _MOST_COLUMNS:
            raise ValueError(f"{columns} columns of results")
        kinds = past[:, 0] if columns == _MOST_COLUMNS else torch.zeros(calls)
        if not ((kinds == 0) | (kinds == 1)).all():
            raise ValueError("results of unknown calls")
        self._kinds.extend(kinds.to(torch.uint8).numpy().tobytes())
        self._losses.frombytes(past[:, max(0, columns - 2)].double().numpy().tobytes())
        norms = array("d", [math.nan]) * calls
        if columns > 1:
            norms = array("d", past[:, -1].double().numpy().tobytes())
        self._norms.extend(norms)
        last = self._kinds.rfind(0)
        if last >= 0:
            self._note_norm(0, self._norms[last])

    def tensor(self) -> Tensor:
        """Return all results, (calls or more, columns): which call it was, the loss, the norm of the gradients or nan.

        The first column is left out where all calls were steps, and then the last where none has a norm. Rows of zeros
        follow, so that a long run has few sizes, whose memory is used again.
        """
        kinds, losses, norms = (_column(each) for each in (self._kinds, self._losses, self._norms))
        columns = [kinds, losses, norms]
        if not kinds.any():
            columns = [losses] if norms.isnan().all() else [losses, norms]
        unit = 1 << max(4, self.count.bit_length() - 4)
        rows = self.count // unit * unit + unit
        # The system's, who takes it back: in the allocator's heap each would leave a hole, a little too small later.
        memory = mmap(-1, rows * len(columns) * torch.float64.itemsize)
        found = torch.frombuffer(memory, dtype=torch.float64).view(rows, len(columns))
        for number, column in enumerate(columns):
            found[: self.count, number] = column
        return found

    @property
    def about(self) -> dict[str, Any]:
        """What is kept beside `tensor`: how many calls it holds, and what the last step's batch is called."""
        return {"batch": self.batch, "calls": self.count}

    @property
    def count(self) -> int:
        """How many results there are."""
        return len(self._kinds)

    def steps_done(self, now: int) -> int:
        """Return how many training steps the script has made, which are `now` when all calls have been answered."""
        return self._kinds.count(0, 0, self._next) if self.behind else now

    def _note_norm(self, kind: int, norm: float) -> None:
        if _KINDS[kind] == "step":
            self.norm = None if math.isnan(norm) else norm

    def replay(self) -> None:
        """Answer the calls from the first one on."""
        self.norm = None
        self._next, self._until = 0, len(self._kinds)
        self._last = self._kinds.rfind(0)

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
        kind = self._kinds[self._next]
        if _KINDS[kind] != what:
            raise ConfigError(
                f"--resume: call {self._next} of the script is {what}, and was {_KINDS[kind]} in the run that "
                "wrote the checkpoint; continue with the same script"
            )
        if self._next == self._last and batch != self.batch and batch and self.batch:
            raise ConfigError(
                f"--resume: the last step before the checkpoint was of {self.batch}, and is of {batch}: the data, "
                "their order or the rows of a batch have changed; continue with the same, or start "
                "again without --resume"
            )
        number, self._next = self._next, self._next + 1
        self._note_norm(kind, self._norms[number])
        return self._losses[number]

    def predicts(self, worker: int) -> None:
        """Warn, once and on worker 0, that what is predicted now is not what was: only numbers are kept."""
        if self.behind and not self._warned:
            self._warned = True
            if worker == 0:
                warnings.warn(
                    f"predict: call {self._next} of the script is behind the checkpoint that it goes on from, whose "
                    "weights this is computed with; a script that decides by it may decide otherwise than then",
                    stacklevel=3,
                )

    def note(self, what: str, loss: float, batch: str = "", norm: float | None = None) -> None:
        """Remember a result, and of a training step what its batch is called and the norm of its gradients."""
        if what == "step":
            self.batch, self.norm = batch, norm
        self._kinds.append(_KINDS.index(what))
        self._losses.append(loss)
        self._norms.append(math.nan if norm is None else norm)


def _column(values: bytearray | array[float]) -> Tensor:
    """Return what shares the memory of `values`, which cannot grow before it is let go."""
    if not values:
        return torch.empty(0, dtype=torch.float64)
    dtype = torch.uint8 if isinstance(values, bytearray) else torch.float64
    return torch.frombuffer(values, dtype=dtype)
