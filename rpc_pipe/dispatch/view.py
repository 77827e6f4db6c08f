"""The view of a watched run: its history, the state of each worker, and findings such as a stall."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..drawing.page import Picture
from ..planning.span import waits
from ..tracing.board import Live, State
from ..tracing.boards import RunUpdate
from ..tracing.history import KEPT_STEPS, RECENT, History
from ..tracing.run_folders import Ending
from ..tracing.stall_report import duration, roll_call, waiting_chain
from ..tracing.trace import spans_of, transfers

#: a stall: nothing has finished for this many seconds, and this many times a usual step
_STALL_S, _STALL_STEPS = 10.0, 10
#: factor of both if no worker has been called
_MORE_BETWEEN = 6
#: seconds between messages about records that were missed
_TELL_DROPPED_S = 10.0
#: a step is reported as slow above this multiple of the usual time, and this many ms more
_SLOW_STEP, _SLOWER_MS = 2.0, 50.0
#: most spans that are shown (fewer steps are shown then), and most for which causes of waits are computed
_MOST_SPANS, _MOST_EXPLAINED = 100_000, 6_000


#: the words for states of workers, in their order; `gone` is one that has ended without leaving
STATES = "starts", "runs", "waits", "between", "left", "stopped", "gone"


@dataclass(frozen=True)
class WorkerRow:
    """The statistics of a worker."""

    worker: int
    state: str
    action: str
    stages: str
    step: int
    #: mean ms of an action over the recent steps
    action_ms: float
    #: share of the recent steps in which it did not compute, 0 to 1
    bubble: float
    #: the action that it waits for, with its worker, as text
    waits_for: str
    for_s: float
    peak_mb: float
    outbox: int


@dataclass(frozen=True)
class LinkRow:
    """The statistics of transfers from one worker to another, over the recent steps."""

    source: int
    target: int
    #: median transfer time of a payload
    ms: float
    mb_per_s: float
    payloads: int
    per_step: float


class View(History):
    """The history of a run, with the workers' present states, a log, and statistics for displays."""

    def __init__(self, keep: int = KEPT_STEPS) -> None:
        super().__init__(keep)
        self.lives: dict[int, Live] = {}
        self.gone: frozenset[int] = frozenset()
        self.now_ns = 0
        self.dropped = 0
        #: log: (seconds since the epoch, message, whether it is a warning)
        self.events: deque[tuple[float, str, bool]] = deque(maxlen=200)
        #: how the run ended, if it failed or was stopped
        self.ending: Ending | None = None
        #: whether the run stalls
        self.stalled = False
        self._progress_ns = 0
        self._told_dropped = -math.inf
        self._longest_ns = 0

    # --- news

    def take(self, update: RunUpdate) -> None:
        self.lives, self.now_ns = dict(update.lives), update.now_ns
        for worker in sorted(update.gone - self.gone):
            self.note(f"worker {worker} has gone", warning=not self._left(worker))
        self.gone = update.gone
        super().take(update)
        self._longest_ns = max([self._longest_ns, *(record.end_ns - record.start_ns for record in update.records)])
        self.events.extend(update.events)
        self._take_ending(update.ending)
        if update.dropped > self.dropped and time.monotonic() > self._told_dropped + _TELL_DROPPED_S:
            self._told_dropped = time.monotonic()
            self.note(f"{update.dropped - self.dropped} records are left out: too fast, or too large", warning=True)
            self.dropped = update.dropped
        self._watch_for_stall()

    def _take_ending(self, ending: Ending | None) -> None:
        """Record how the run ended; None: it goes on, perhaps after a restart."""
        if ending is not None and ending != self.ending:
            self.note(f"the run {ending}".splitlines()[0], warning=True)
        self.ending = ending

    def note(self, text: str, *, warning: bool = False) -> None:
        """Add a message to the log."""
        self.events.append((time.time(), text, warning))

    def _left(self, worker: int) -> bool:
        return self.lives[worker].state is State.LEFT

    def _completed(self, step: int) -> None:
        before = self.losses[-1][1] if self.losses else 0.0
        super()._completed(step)
        loss = self.losses[-1][1]
        if not math.isfinite(loss) and math.isfinite(before):
            self.note(f"step {step}: the loss is {loss}", warning=True)
        times = [self.length_ms(s) for s in self.complete_steps(RECENT)]
        if len(times) >= RECENT and times[-1] > max(_SLOW_STEP * median(times), median(times) + _SLOWER_MS):
            self.note(f"step {step} took {times[-1]:.0f} ms, usually {median(times):.0f} ms", warning=True)

    def _watch_for_stall(self) -> None:
        latest = max((live.since_ns for live in self.lives.values()), default=0)
        idle = all(live.state in (State.STARTING, State.LEFT) for live in self.lives.values())
        patience = max(_STALL_S * 1e9, _STALL_STEPS * self._longest_ns)
        if all(live.state is State.BETWEEN for live in self.lives.values()):  # perhaps saving or loading data
            patience *= _MORE_BETWEEN
        if latest > self._progress_ns or idle or self.gone.issuperset(self.lives):
            self._progress_ns = max(latest, self._progress_ns)
            self.stalled = False
        elif not self.stalled and self.now_ns - latest > patience:
            self.stalled = True
            self.note(f"nothing has finished for {duration(self.now_ns - latest)}", warning=True)
            for line in self.roll_call():
                self.note(line, warning=True)

    # --- questions

    def bubble(self) -> float | None:
        """Return the share of the workers' time in the recent steps in which they did not compute."""
        rows = self.rows() if self.complete_steps(1) else []
        return sum(row.bubble for row in rows) / len(rows) if rows else None

    def rows(self) -> list[WorkerRow]:
        """Return a row for each visible worker."""
        steps = self.complete_steps(RECENT)
        return [self._row(worker, steps) for worker in sorted(self.headers)]

    def _row(self, worker: int, steps: list[int]) -> WorkerRow:
        live, header = self.lives.get(worker, Live()), self.headers[worker]
        records = [self._steps[step][worker] for step in steps]
        busy = sum(record.busy_ns for record in records)
        # From the start of the first to the end of the last step, the time between steps included.
        length = records[-1].end_ns - records[0].start_ns if records else 0
        timed = [span.end - span.start for span in spans_of(records)]
        waits_for = ""
        if live.state is State.WAITING:
            waits_for = "the result" if live.missing is None else f"{live.missing} of {live.peer}"
        return WorkerRow(
            worker=worker,
            state="gone" if worker in self.gone and live.state is not State.LEFT else STATES[live.state],
            action=str(live.action) if live.state is State.RUNNING else "",
            stages=",".join(str(stage) for stage in sorted({stage for stage, *_ in header["shards"]})),
            step=live.step,
            action_ms=sum(timed) / len(timed) if timed else math.nan,
            bubble=1 - busy / length if length else math.nan,
            waits_for=waits_for,
            for_s=max(0.0, (self.now_ns - live.since_ns) / 1e9) if live.since_ns else 0.0,
            peak_mb=records[-1].peak_bytes / 1e6 if records else math.nan,
            outbox=records[-1].outbox if records else 0,
        )

    def links(self) -> list[LinkRow]:
        """Return the statistics of transfers by link."""
        steps = self.complete_steps(RECENT)
        seconds = len(steps) * (self.step_ms() or 0.0) / 1e3
        found = sorted(transfers(map(self.records, steps)).items()) if seconds else []
        return [
            LinkRow(
                *pair,
                ms=median(way.ms for way in there),
                mb_per_s=sum(way.num_bytes for way in there) / 1e6 / seconds,
                payloads=len(there),
                per_step=len(there) / len(steps),
            )
            for pair, there in found
        ]

    def roll_call(self) -> list[str]:
        """Return the lines of the stall report."""
        return roll_call(self.lives, self._last_host(), self.now_ns)

    def culprit(self) -> int | None:
        """Return the worker at the end of the chain of waits."""
        return waiting_chain(self.lives, self._last_host())[-1] if self.lives else None

    def _last_host(self) -> int:
        """Return a worker of the last stage, which has the result."""
        return max(self.headers, key=lambda w: max(stage for stage, *_ in self.headers[w]["shards"]), default=0)


def draw_steps(view: View, count: int) -> list[Picture]:
    """Return the last `count` steps, planned and actual; fewer if they are very large."""
    trace = view.trace(count)
    if trace is None:
        return [Picture("planned", [], view.num_workers), Picture("actual", [], view.num_workers)]
    largest = max(sum(len(record.actions) for record in records) for records in trace.steps.values())
    trace = view.trace(max(1, min(count, _MOST_SPANS // max(1, largest)))) or trace
    workers, spec, found = view.num_workers, trace.spec, []
    planned = trace.simulated(len(trace.steps)).spans
    for name, spans in (("planned", planned), ("actual", trace.spans())):
        causes = waits(spec, spans, slack=trace.clock_error_ms) if len(spans) <= _MOST_EXPLAINED else {}
        found.append(Picture(name, spans, workers, "ms", "idle", causes, len(spec.slice_sizes)))
    return found


def describe(view: View) -> dict[str, Any]:
    """Return the present state of the run, for JSON; unknown numbers are null."""
    lost, steps, rate = view.lost(), view.complete_steps(1), view.throughput()
    header = next(iter(view.headers.values()), {})
    return {
        "schedule": header.get("schedule"),
        "num_workers": view.num_workers,
        "step": steps[0] if steps else None,
        "loss": finite(view.losses[-1][1]) if view.losses else None,
        "step_ms": view.step_ms(),
        "rate": rate[0] if rate else None,
        "unit": rate[1] if rate else None,
        "bubble": view.bubble(),
        "stalled": view.stalled,
        "ending": view.ending._asdict() if view.ending is not None else None,
        "clock_error_ms": view.clock_error_ms,
        "dropped": view.dropped,
        "workers": [{key: finite(value) for key, value in asdict(row).items()} for row in view.rows()],
        "links": list(map(asdict, view.links())),
        "events": list(view.events)[-100:],
        "lost": lost.as_json() if lost else None,
    }


def finite(value: Any) -> Any:
    """Return a number, or None if it is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
