"""Recorded on every worker, put together on worker 0 with aligned clocks: for runs that end together."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ..dependency import F, Spec
from ..workers.hooks import Listener, StepRecord
from .board import pack_record, unpack_record
from .trace import Trace
from .training import Training

if TYPE_CHECKING:
    from ..workers.actor import WorkerActor
    from ..workers.transport.payload import Tree


class Recorder:
    """Keeps the last `num_steps` steps of the workers of this process."""

    def __init__(self, pipeline: Training, num_steps: int = 16) -> None:
        self._pipeline = pipeline
        self._kept: dict[int, deque[StepRecord]] = {}

        def listener(worker: int) -> Listener:
            kept = self._kept[worker] = deque(maxlen=num_steps)

            class Keeper(Listener):
                def step_finished(self, record: StepRecord) -> None:
                    kept.append(record)

            return Keeper()

        pipeline.listen(listener)

    def collect(self) -> Trace | None:
        """Return the trace of all workers on worker 0, None elsewhere. All workers call this."""

        def own(actor: WorkerActor) -> Tree:
            offset, error = (0, 0) if actor.worker == 0 else actor.carrier.clock_offset(0)
            return {"offset": offset, "error": error, "steps": [pack_record(r) for r in self._kept[actor.worker]]}

        parts = self._pipeline.gather("trace", own)
        if parts is None:
            return None
        steps: dict[int, list[StepRecord]] = defaultdict(list)
        for part in parts:
            for packed in part["steps"]:
                record = unpack_record(packed, part["offset"])
                steps[record.step].append(record)
        return Trace(self._spec_of(steps), dict(steps), max(part["error"] for part in parts) / 1e6)

    def _spec_of(self, steps: dict[int, list[StepRecord]]) -> Spec:
        """Return the spec of what ran: a batch of few rows makes fewer microbatches."""
        if not steps:
            return self._pipeline.spec
        ran = {run.action.microbatch for record in steps[max(steps)] for run in record.actions if run.action.kind is F}
        return replace(self._pipeline.spec, num_microbatches=len(ran))
