"""What is known of a run: the last steps of all workers, what each does now, what it means."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ..dependency import ConfigError, Spec
from ..planning.simulator import simulate
from ..planning.span import Span
from ..tracing.board import Live, State
from ..tracing.boards import News
from ..tracing.listing import spec_of_listings
from ..tracing.lost import Lost, attribute
from ..tracing.trace import Trace, ways
from ..workers.hooks import StepRecord
from .rollcall import blame, duration, roll_call

#: steps kept in full, and points of the loss curve
_KEPT_STEPS, _KEPT_LOSSES = 64, 20_000
#: steps that say how it goes now
_RECENT = 8
#: how often, at most, the lost time is attributed: it simulates the schedule
_ATTRIBUTE_EVERY_S = 2.0
#: nothing has finished for so long, and for so many times a usual step: a stall
_STALL_S, _STALL_STEPS = 10.0, 10
#: so many times as long if no worker has been asked for anything
_MORE_BETWEEN = 6
#: how often it is told that records are left out
_TELL_DROPPED_S = 10.0
#: a step that takes so many times as long as usual, and so many ms longer, is told
_SLOW_STEP, _SLOWER_MS = 2.0, 50.0


@dataclass(frozen=True)
class WorkerRow:
    """What is said of a worker in a line."""

    worker: int
    state: str
    action: str
    stages: str
    step: int
    #: mean time of an action that takes time, over the recent steps
    action_ms: float
    #: share of the recent steps in which it did not compute, 0 to 1
    bubble: float
    #: what it waits for, and of whom
    waits_for: str
    for_s: float
    peak_mb: float
    outbox: int


@dataclass(frozen=True)
class LinkRow:
    """How payloads fare from one worker to another, over the recent steps."""

    source: int
    target: int
    #: median time that a payload is on its way
    ms: float
    mb_per_s: float
    payloads: int
    per_step: float


class View:
    """Takes in news and answers questions; knows neither where they come from nor who asks.

    Args:
        keep: how many steps to remember.
    """

    def __init__(self, keep: int = _KEPT_STEPS) -> None:
        self._keep = keep
        self.headers: dict[int, dict[str, Any]] = {}
        #: by worker and number of microbatches, what it runs
        self.listings: dict[tuple[int, int], dict[str, Any]] = {}
        self.lives: dict[int, Live] = {}
        self.gone: frozenset[int] = frozenset()
        self.now_ns = 0
        self.clock_error_ms = 0.0
        self.dropped = 0
        #: step -> the loss of its batch
        self.losses: deque[tuple[int, float]] = deque(maxlen=_KEPT_LOSSES)
        #: (seconds since the epoch, what happened, whether it is a warning)
        self.events: deque[tuple[float, str, bool]] = deque(maxlen=200)
        #: nothing has finished for a while
        self.stalled = False
        self._steps: dict[int, dict[int, StepRecord]] = {}
        self._specs: dict[int, Spec | None] = {}
        self._lost: tuple[float, int, Lost | None] = (0.0, -1, None)
        self._progress_ns = 0
        self._told_dropped = -math.inf
        self._longest_ns = 0

    # --- news

    def take(self, news: News) -> None:
        """Take in what a look has brought."""
        before = self.pipelines
        if news.headers.keys() - self.headers.keys() or news.listings.keys() - self.listings.keys():
            self._specs.clear()
        self.headers, self.listings = dict(news.headers), dict(news.listings)
        if any(before.get(worker, made) != made for worker, made in self.pipelines.items()):
            self._steps.clear()
            self.losses.clear()
            self._specs.clear()
            self._lost = 0.0, -1, None
        self.lives, self.now_ns = dict(news.lives), news.now_ns
        self.clock_error_ms = news.clock_error_ms
        for worker in sorted(news.gone - self.gone):
            self.note(f"worker {worker} has gone", warning=not self._left(worker))
        self.gone = news.gone
        for record in news.records:
            self._steps.setdefault(record.step, {})[record.worker] = record
            self._longest_ns = max(self._longest_ns, record.end_ns - record.start_ns)
            if len(self._steps[record.step]) == self.num_workers:
                self._completed(record.step)
        self.events.extend(news.events)
        if news.dropped > self.dropped and time.monotonic() > self._told_dropped + _TELL_DROPPED_S:
            self._told_dropped = time.monotonic()
            self.note(f"{news.dropped - self.dropped} records are left out: too fast, or too large", warning=True)
            self.dropped = news.dropped
        while len(self._steps) > self._keep:
            del self._steps[min(self._steps)]
        self._watch_for_stall()

    def note(self, text: str, *, warning: bool = False) -> None:
        """Enter something into the log."""
        self.events.append((time.time(), text, warning))

    def _left(self, worker: int) -> bool:
        return self.lives[worker].state is State.LEFT

    def _completed(self, step: int) -> None:
        records = self._steps[step]
        loss = next(iter(records.values())).loss
        if not math.isfinite(loss) and (not self.losses or math.isfinite(self.losses[-1][1])):
            self.note(f"step {step}: the loss is {loss}", warning=True)
        self.losses.append((step, loss))
        times = [self.length_ms(s) for s in self.complete_steps(_RECENT)]
        if len(times) >= _RECENT and times[-1] > max(_SLOW_STEP * median(times), median(times) + _SLOWER_MS):
            self.note(f"step {step} took {times[-1]:.0f} ms, usually {median(times):.0f} ms", warning=True)

    def length_ms(self, step: int) -> float:
        """Return the time from the first worker's beginning of a complete step to the last one's end."""
        records = self._steps[step].values()
        return (max(r.end_ns for r in records) - min(r.start_ns for r in records)) / 1e6

    def _watch_for_stall(self) -> None:
        latest = max((live.since_ns for live in self.lives.values()), default=0)
        idle = all(live.state in (State.STARTING, State.LEFT) for live in self.lives.values())
        patience = max(_STALL_S * 1e9, _STALL_STEPS * self._longest_ns)
        if all(live.state is State.BETWEEN for live in self.lives.values()):  # saving, perhaps, or loading data
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

    @property
    def num_workers(self) -> int:
        """How many workers the run has, whether they can be seen or not."""
        return next((header["num_workers"] for header in self.headers.values()), 0)

    @property
    def spec(self) -> Spec | None:
        """The schedule that runs, for as many microbatches as the pipeline was made for; None until it is known."""
        header = next(iter(self.headers.values()), None)
        return None if header is None else self._spec_of(header["microbatches"])

    @property
    def pipelines(self) -> dict[int, int]:
        """What tells, by worker, one pipeline from the next of the same process, whose steps count from 0 again."""
        return {worker: header["clock_ns"] for worker, header in self.headers.items()}

    def complete_steps(self, count: int) -> list[int]:
        """Return the last `count` steps that all workers have finished."""
        complete = [step for step in sorted(self._steps) if len(self._steps[step]) == self.num_workers]
        return complete[-count:] if count else complete

    def records(self, step: int) -> list[StepRecord]:
        """Return what every worker did in a complete step, in order of workers."""
        return [record for _, record in sorted(self._steps[step].items())]

    def trace(self, count: int = _RECENT) -> Trace | None:
        """Return the last complete steps that follow each other and are alike; all that there are if `count` is 0.

        None if there is none, or the schedule is not known. A batch of few rows makes fewer microbatches: a step that
        cannot be compared with the others, unless most are so.
        """
        steps = self.complete_steps(0)
        sizes = {step: self._num_microbatches(step) for step in steps[-max(count, _RECENT) :]}
        if not sizes:
            return None
        usual = Counter(sizes.values()).most_common(1)[0][0]
        found: list[int] = []
        for step in reversed(steps):
            if self._num_microbatches(step) != usual or (found and step != found[-1] - 1):
                if found:
                    break
                continue
            found.append(step)
        return self.trace_of(sorted(found[:count] if count else found))

    def trace_of(self, steps: Sequence[int]) -> Trace | None:
        """Return these complete steps, if the schedule of as many microbatches is known."""
        spec = self._spec_of(self._num_microbatches(steps[0])) if steps else None
        if spec is None:
            return None
        return Trace(spec, {step: self.records(step) for step in steps}, self.clock_error_ms)

    def _num_microbatches(self, step: int) -> int:
        return next(iter(self._steps[step].values())).num_microbatches

    def _spec_of(self, num_microbatches: int) -> Spec | None:
        """Return the schedule for so many microbatches, from what all workers list of it; None if they do not yet.

        A part of what they list for more microbatches is as good where they list no more.
        """
        if num_microbatches not in self._specs:
            listed = Counter(count for _, count in self.listings)
            enough = [count for count, workers in listed.items() if workers == self.num_workers]
            least = min((count for count in enough if count >= num_microbatches), default=None)
            if least is None:
                return None
            listings = [self.listings[worker, least] for worker in range(self.num_workers)]
            try:
                self._specs[num_microbatches] = spec_of_listings(listings, num_microbatches)
            except ConfigError as error:
                self._specs[num_microbatches] = None
                self.note(str(error), warning=True)
        return self._specs[num_microbatches]

    def planned(self, trace: Trace, steps: int = 1) -> list[Span]:
        """Return what the schedule would do in the times that actions took, with free transfers."""
        return list(simulate(trace.spec, trace.cost(), steps=steps).spans)

    def lost(self, *, fresh: bool = False) -> Lost | None:
        """Return where the time of the recent steps went; at most two seconds old, or `fresh`."""
        at, step, lost = self._lost
        complete = self.complete_steps(1)
        if complete and complete[0] != step and (fresh or time.monotonic() > at + _ATTRIBUTE_EVERY_S):
            trace = self.trace(_RECENT + 1)
            if trace is not None:
                headers = [header for _, header in sorted(self.headers.items())]
                one_machine = len({header["host"] for header in headers}) == 1
                cores = headers[0].get("cores") if one_machine and headers[0]["device"] == "cpu" else None
                lost = attribute(trace, [header["shards"] for header in headers], cores)
                self._lost = time.monotonic(), complete[0], lost
        return lost

    def step_ms(self) -> float | None:
        """Return the median time from the end of a step to the end of the next, over the recent steps."""
        steps = self.complete_steps(_RECENT + 1)
        ends = [max(record.end_ns for record in self._steps[step].values()) for step in steps]
        if len(ends) < 2:
            return self.length_ms(steps[0]) if steps else None
        return median(after - before for before, after in pairwise(ends)) / 1e6

    def throughput(self) -> tuple[float, str] | None:
        """Return tokens, or else rows, a second over the recent steps, and which of them."""
        step_ms, steps = self.step_ms(), self.complete_steps(_RECENT)
        if not steps or not step_ms:
            return None
        records = [self.records(step)[0] for step in steps]
        tokens = sum(record.tokens for record in records)
        count = tokens or sum(record.rows for record in records)
        return 1e3 * count / (len(records) * step_ms), "tokens" if tokens else "rows"

    def bubble(self) -> float | None:
        """Return the share of the workers' time in the recent steps that was not spent computing."""
        rows = self.rows() if self.complete_steps(1) else []
        return sum(row.bubble for row in rows) / len(rows) if rows else None

    def rows(self) -> list[WorkerRow]:
        """Return a row for each worker that can be seen."""
        steps = self.complete_steps(_RECENT)
        return [self._row(worker, steps) for worker in sorted(self.headers)]

    def _row(self, worker: int, steps: list[int]) -> WorkerRow:
        live, header = self.lives.get(worker, Live()), self.headers[worker]
        records = [self._steps[step][worker] for step in steps]
        busy = sum(record.busy_ns for record in records)
        # From the start of the first to the end of the last step: what lies between steps is not computing either.
        length = records[-1].end_ns - records[0].start_ns if records else 0
        timed = [r.end_ns - r.start_ns for record in records for r in record.actions]
        waits_for = ""
        if live.state is State.WAITING:
            waits_for = "the result" if live.missing is None else f"{live.missing} of {live.peer}"
        return WorkerRow(
            worker=worker,
            state=self._state(worker, live),
            action=str(live.action) if live.state is State.RUNNING else "",
            stages=",".join(str(stage) for stage in sorted({stage for stage, _, _ in header["shards"]})),
            step=live.step,
            action_ms=sum(timed) / len(timed) / 1e6 if timed else math.nan,
            bubble=1 - busy / length if length else math.nan,
            waits_for=waits_for,
            for_s=max(0.0, (self.now_ns - live.since_ns) / 1e9) if live.since_ns else 0.0,
            peak_mb=records[-1].peak_bytes / 1e6 if records else math.nan,
            outbox=records[-1].outbox if records else 0,
        )

    def _state(self, worker: int, live: Live) -> str:
        if worker in self.gone:
            return "left" if live.state is State.LEFT else "gone"
        words = {
            State.RUNNING: "runs",
            State.WAITING: "waits",
            State.BETWEEN: "between",
            State.STARTING: "starts",
            State.STOPPED: "stopped",
        }
        return words.get(live.state, "left")

    def links(self) -> list[LinkRow]:
        """Return how payloads fare between workers."""
        steps = self.complete_steps(_RECENT)
        seconds = len(steps) * (self.step_ms() or 0.0) / 1e3
        found = sorted(ways(map(self.records, steps)).items()) if seconds else []
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
        """Return who does what, and the worker that everybody waits for."""
        return roll_call(self.lives, self._last_host(), self.now_ns)

    def culprit(self) -> int | None:
        """Return the worker that the others wait for in the end."""
        return blame(self.lives, self._last_host())[-1] if self.lives else None

    def _last_host(self) -> int:
        """Return a worker that has the last stage, and so tells the result."""
        return max(self.headers, key=lambda w: max(stage for stage, _, _ in self.headers[w]["shards"]), default=0)
