"""Data of the displays: a row for each worker and link, pictures of the last steps, and all of it for JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..boards.board import Live, State
from ..boards.view import RECENT, View
from ..drawing.svg import Picture
from ..drawing.timeline import idle
from ..tracing.lost_time import lost_time
from ..tracing.trace import recent_trace, spans_of, transfers
from ..workers.hooks import StepRecord

#: most spans that are shown: fewer steps are shown then
_MOST_SPANS = 10_000
#: the words for states of workers, in their order; `gone` is one that has ended without leaving
STATES = "starts", "runs", "waits", "between", "left", "stopped", "gone"


@dataclass(frozen=True)
class WorkerRow:
    """The statistics of a worker."""

    worker: int
    #: its number for the system
    process: str
    state: str
    action: str
    stages: str
    step: int
    #: mean ms of an action over the recent steps
    action_ms: float
    #: idle share of the recent steps, 0 to 1
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


def worker_rows(view: View) -> list[WorkerRow]:
    """Return a row for each visible process."""
    steps = [view.records(step) for step in view.complete_steps(RECENT)]
    # The time between steps counts, too.
    shares = idle([span for records in steps for span in spans_of(records)], view.num_workers)
    shares = shares or [math.nan] * view.num_workers
    at = {rank: header["worker"] for rank, header in sorted(view.headers.items())}
    return [_row(view, rank, [records[w] for records in steps], shares[w]) for rank, w in at.items()]


def _row(view: View, worker: int, records: list[Any], idle_share: float) -> WorkerRow:
    live, header = view.latest.lives.get(worker, Live()), view.headers[worker]
    timed = [span.end - span.start for span in spans_of(records)]
    awaited = "the result" if live.missing is None else f"{live.missing} of {live.peer}"
    return WorkerRow(
        worker=worker,
        process=header["process"].partition("/")[0],
        state="gone" if worker in view.latest.gone and live.state is not State.LEFT else STATES[live.state],
        action=str(live.action) if live.state is State.RUNNING else "",
        stages=",".join(map(str, sorted({stage for stage, *_ in header["shards"]}))),
        step=live.step,
        action_ms=sum(timed) / len(timed) if timed else math.nan,
        bubble=idle_share,
        waits_for=awaited if live.state is State.WAITING else "",
        for_s=max(0.0, (view.latest.now_ns - live.since_ns) / 1e9) if live.since_ns else 0.0,
        peak_mb=records[-1].peak_bytes / 1e6 if records else math.nan,
        outbox=records[-1].outbox if records else 0,
    )


def link_rows(view: View) -> list[LinkRow]:
    """Return the statistics of transfers by link."""
    steps, numbers = view.complete_steps(RECENT), view.numbers
    seconds, rows = len(steps) * (view.step_ms() or 0.0) / 1e3, list[LinkRow]()
    for (source, target), there in sorted(transfers(map(view.records, steps)).items()) if seconds else ():
        rate, count = sum(way.num_bytes for way in there) / 1e6 / seconds, len(there)
        ms = median(way.ms for way in there)
        rows.append(LinkRow(numbers[source], numbers[target], ms, rate, count, count / len(steps)))
    return rows


def draw_steps(view: View, count: int) -> list[Picture]:
    """Return the last `count` steps, planned and actual; fewer if they are very large."""
    trace = recent_trace(view, count)
    if trace is None:
        return [Picture(name, [], view.num_workers) for name in ("planned", "actual")]
    largest = max(sum(len(record.actions) for record in records) for records in trace.steps.values())
    trace = recent_trace(view, max(1, min(count, _MOST_SPANS // max(1, largest)))) or trace
    return list(trace.pictures())


def describe(view: View) -> dict[str, Any]:
    """Return the present state of the run, for JSON; unknown numbers are null."""
    lost, steps, rows = lost_time(view), view.complete_steps(1), worker_rows(view)
    last = view.records(steps[0]) if steps else []
    rate, unit = view.throughput() or (None, None)
    shares = [row.bubble for row in rows if not math.isnan(row.bubble)]
    ending = view.latest.ending
    return {
        "schedule": view.header.get("schedule"),
        "num_workers": view.num_workers,
        "step": steps[0] if steps else None,
        "loss": finite(view.losses[-1][1]) if view.losses else None,
        "grad_norm": finite(last[0].grad_norm) if last else None,
        "learning_rate": finite(learning_rate(last)),
        "held_out": [(step, finite(loss)) for step, loss in view.held_out_losses],
        "step_ms": view.step_ms(),
        "rate": rate,
        "unit": unit,
        "with_padding": view.with_padding,
        "bubble": sum(shares) / len(shares) if shares else None,
        "stalled": view.stalled,
        "ending": ending._asdict() if ending is not None else None,
        "clock_error_ms": view.latest.clock_error_ms,
        "dropped": view.latest.dropped,
        "workers": [{key: finite(value) for key, value in asdict(row).items()} for row in rows],
        "links": list(map(asdict, link_rows(view))),
        "events": list(view.events)[-100:],
        "lost": lost.as_json() if lost else None,
    }


def learning_rate(records: Sequence[StepRecord]) -> float | None:
    """Return the learning rate after a step, of the first worker that trains; None: nothing is trained."""
    return next((record.learning_rate for record in records if record.learning_rate is not None), None)


def whole_state(view: View, name: str, over: bool, after: int = -1) -> dict[str, Any]:
    """Return the state of the run `name` for its page, with the losses after step `after`."""
    losses = [(step, finite(loss)) for step, loss in view.losses if step > after]
    fresh = bool(view.losses) and view.losses[-1][0] < after
    return {**describe(view), "name": name, "over": over, "losses": losses, "fresh": fresh}


def finite(value: Any) -> Any:
    """Return a number, or None if it is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
