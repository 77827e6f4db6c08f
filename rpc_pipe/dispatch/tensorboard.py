"""Scalars of a run for TensorBoard. Needs the extra `rpc-pipe[tensorboard]`."""

from __future__ import annotations

import math
from pathlib import Path

from ..dependency import ConfigError
from .view import View


class Scalars:
    """Writes loss, times and bubbles of every step.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"--tensorboard: needs {error.name}; pip install 'rpc-pipe[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder))
        self._last_step = -1
        self._run: dict[int, int] = {}
        self._last_lost: object = None

    def write(self, view: View) -> None:
        """Write the steps that are new since the last call."""
        run = view.pipelines
        if run.keys() == self._run.keys() and run != self._run:
            self._last_step = -1
        self._run = run
        for step in view.complete_steps(0):
            if step <= self._last_step:
                continue
            self._last_step = step
            records = view.records(step)
            length_ms = view.length_ms(step)
            scalars = {"loss": records[0].loss, "step/ms": length_ms}
            for record in records:
                scalars[f"bubble/worker {record.worker}"] = 1 - record.busy_ns / 1e6 / length_ms
                scalars[f"peak MB/worker {record.worker}"] = record.peak_bytes / 1e6
            for name, value in scalars.items():
                if not math.isnan(value):
                    self._writer.add_scalar(name, value, step)
        lost = view.lost()
        if lost is not None and lost is not self._last_lost:
            self._last_lost = lost
            for cause, ms in lost.parts().items():
                self._writer.add_scalar(f"lost ms/{cause}", ms, self._last_step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
