"""Scalars of a run for TensorBoard. Needs the extra `.[tensorboard]`."""

from __future__ import annotations

import math
from pathlib import Path

from ..dependency import ConfigError
from ..drawing.timeline import idle
from ..tracing.trace import spans_of
from ..tracing.view import View


def scalars_of(view: View, step: int) -> dict[str, float]:
    """Return the known figures of a step by name; rates are from end to end of steps, as a script's report has them."""
    records, seconds = view.records(step), view.took_ms(step) / 1e3
    found: dict[str, float | None] = {
        "loss": records[0].loss, "gradient norm": records[0].grad_norm, "rows per s": records[0].rows / seconds,
        "learning rate": next((r.learning_rate for r in records if r.learning_rate is not None), None),
        "tokens per s": records[0].tokens / seconds or None, "step/ms": view.length_ms(step),
    }  # fmt: skip
    for record, share in zip(records, idle(spans_of(records), len(records)), strict=True):
        found |= {f"bubble/worker {record.worker}": share, f"peak MB/worker {record.worker}": record.peak_bytes / 1e6}
    return {name: value for name, value in found.items() if value is not None and not math.isnan(value)}


class Scalars:
    """Writes figures of every step, evaluations, and the lost time by cause.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"--tensorboard: needs {error.name}; pip install '.[tensorboard]'") from error
        self._writer, self.close = (writer := SummaryWriter(str(folder))), writer.close
        self._run, self._last, self._seen = dict[int, int](), -1, set[tuple[str, float, int]]()

    def write(self, view: View) -> None:
        """Write what is new since the last call."""
        if view.pipelines != self._run:
            self._run, self._last = view.pipelines, -1
        steps = [step for step in view.complete_steps(0) if step > self._last]
        self._last = max([self._last, *steps])
        found = [(name, value, step) for step in steps for name, value in scalars_of(view, step).items()]
        beside = {("held-out loss", loss, step) for step, loss in view.held_out_losses}
        if steps and (lost := view.lost()) is not None:
            found += [(f"lost ms/{cause}", ms, self._last) for cause, ms in lost.parts.items()]
        for name, value, step in [*found, *(beside - self._seen)]:
            self._writer.add_scalar(name, value, step)
        self._seen = beside
        self._writer.flush()
