"""What actually ran: recorded on every worker, put together on worker 0 with aligned clocks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .chrome import write_chrome
from .dependency import Action, Kind, Spec
from .page import Picture, draw_page
from .pipeline import Pipeline
from .simulator import Simulation
from .timeline import Span
from .waits import waits
from .workers.actor import WorkerActor
from .workers.hooks import Listener, StepRecord
from .workers.payload import Tree


class Recorder:
    """Keeps the last `num_steps` steps of the workers of this process."""

    def __init__(self, pipeline: Pipeline, num_steps: int = 16) -> None:
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
            offset, error = (0, 0) if actor.worker == 0 else actor.transport.clock_offset(0)
            steps = [
                [r.step, r.start_ns + offset, r.end_ns + offset,
                 [(str(a.action), a.start_ns + offset, a.end_ns + offset) for a in r.actions]]
                for r in self._kept[actor.worker]
            ]  # fmt: skip
            return {"error": error, "steps": steps}

        parts = self._pipeline.gather("trace", own)
        if parts is None:
            return None
        spans: dict[int, list[Span]] = defaultdict(list)
        for worker, part in enumerate(parts):
            for step, _, _, actions in part["steps"]:
                spans[step] += [
                    Span(worker, Action.parse(name), start / 1e6, end / 1e6) for name, start, end in actions
                ]
        return Trace(self._pipeline.spec, dict(spans), max(part["error"] for part in parts) / 1e6)


@dataclass(frozen=True)
class Trace:
    """Consecutive steps of all workers. Times are milliseconds of worker 0's clock."""

    spec: Spec
    #: step -> what ran in it
    steps: dict[int, list[Span]]
    #: largest error of the alignment of clocks, in ms
    clock_error_ms: float

    def spans(self) -> list[Span]:
        return [span for step in sorted(self.steps) for span in self.steps[step]]

    @property
    def bubble(self) -> float:
        """Share of the workers' time over the recorded steps that was not spent computing."""
        spans = self.spans()
        length = max(s.end for s in spans) - min(s.start for s in spans)
        return 1 - sum(s.end - s.start for s in spans) / (self.spec.num_workers * length)

    def costs(self) -> dict[tuple[int, Kind], float]:
        """Return the median time of an action in ms, by stage and kind."""
        times: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for span in self.spans():
            times[span.action.stage, span.action.kind].append(span.end - span.start)
        return {key: sorted(values)[len(values) // 2] for key, values in times.items()}

    def write_chrome(self, path: str | Path, device: str = "cpu") -> None:
        """Write Chrome's trace event format, which Perfetto reads."""
        write_chrome(path, self.spec, self.steps, device=device)


def last_steps(trace: Trace, count: int) -> Sequence[Span]:
    """Return what ran in the last `count` steps."""
    return [span for step in sorted(trace.steps)[-count:] for span in trace.steps[step]]


def planned_and_actual(planned: Simulation, trace: Trace) -> str:
    """Return a page with a step as it was planned, in milliseconds, above the last one as it ran."""
    actual, spec = last_steps(trace, 1), trace.spec
    return draw_page([
        Picture("planned", planned.spans, spec.num_workers, "ms", waits(spec, planned.spans)),
        Picture("actual", actual, spec.num_workers, "ms", waits(spec, actual, slack=trace.clock_error_ms)),
    ])  # fmt: skip
