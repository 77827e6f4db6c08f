"""Runs that never ran: the simulator's times written down as workers would."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rpc_pipe.boards.board import Live, State
from rpc_pipe.boards.own_boards import list_program
from rpc_pipe.boards.run_boards import RunUpdate
from rpc_pipe.boards.view import View
from rpc_pipe.dependency import Action, B, F, Spec, U, entries
from rpc_pipe.planning.simulator import Cost, Link, simulate, uniform
from rpc_pipe.planning.span import Span
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.tracing.trace import Trace
from rpc_pipe.workers.hooks import Arrived, Record, StepRecord

COST = uniform({F: 10, B: 20, U: 1})


def records_of(
    spec: Spec,
    cost: Cost = COST,
    *,
    steps: int = 4,
    links: Mapping[tuple[int, int], Link] | None = None,
    pause_ms: float = 0.0,
    hop_ms: float = 0.5,
    lengths: Sequence[float] = (),
) -> dict[int, Sequence[StepRecord]]:
    """Return {step: records} of a simulated run; payloads are as large as microbatches are long."""
    lengths = lengths or [1] * spec.num_microbatches
    result = simulate(spec, cost, comm=hop_ms, steps=steps, links=links)
    there = {(what, target): at for what, _, target, at in result.transfers if spec.worker(what) != target}
    seen: Counter[tuple[int, Action]] = Counter()
    by_step: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    arrivals: dict[int, list[Action]] = defaultdict(list)
    for span in result.spans:
        step = seen[span.worker, span.action]
        seen[span.worker, span.action] += 1
        by_step[step][span.worker].append(span)
    for (what, target), _ in there.items():
        arrivals[target].append(what)
    found: dict[int, Sequence[StepRecord]] = {}
    ends: dict[int, int] = defaultdict(int)
    for step in sorted(by_step):
        late, of_step = round(step * pause_ms * 1e6), list[StepRecord]()
        made = {s.action: s.end for spans in by_step[step].values() for s in spans}
        for worker in range(spec.num_workers):
            ran = [
                Record(s.action, round(s.start * 1e6) + late, round(s.end * 1e6) + late)
                for s in by_step[step][worker]
            ]  # fmt: skip
            link = links or {}
            came = [
                Arrived(
                    what, spec.worker(what), round(1000 * (lengths[what.index] if what.kind.per_microbatch else 1)),
                    round((made[what] + (link[spec.worker(what), worker].latency
                                         if (spec.worker(what), worker) in link else hop_ms)) * 1e6) + late,
                )
                for what in arrivals[worker]
            ]  # fmt: skip
            start = ends[worker] + (late > 0) * round(pause_ms * 1e6)
            of_step.append(
                StepRecord(
                    worker, step, min(start, ran[0].start_ns), ran[-1].end_ns, ran,
                    sorted(came, key=lambda a: a.at_ns), 3 - 0.1 * step, 8, 1024, 10**9, 2,
                    spec.num_microbatches,
                )
            )  # fmt: skip
            ends[worker] = ran[-1].end_ns
        found[step] = of_step
    return found


def trace_of(schedule: str = "1f1b", workers: int = 4, microbatches: int = 8, **options: Any) -> Trace:
    spec = make_spec(schedule, workers, microbatches, {})
    return Trace(spec, records_of(spec, **options))


def news_of(spec: Spec, records: Mapping[int, Sequence[StepRecord]], lives: dict[int, Live] | None = None) -> RunUpdate:
    """Return what a look at such a run would bring."""
    headers = {
        worker: {
            "worker": worker, "num_workers": spec.num_workers, "process": "1/1/elsewhere", "host": "here",
            "device": "cpu", "schedule": "1f1b", "cores": 64, "shards": [(s, r, 2, 1) for s, r in spec.hosted(worker)],
            "clock_ns": 7 + worker, "microbatches": spec.num_microbatches,
        }
        for worker in range(spec.num_workers)
    }  # fmt: skip
    listings = {
        worker: list_program(spec, worker, "ready", list(entries(spec, worker))) for worker in range(spec.num_workers)
    }
    now = max(record.end_ns for found in records.values() for record in found)
    lives = lives or {w: Live(State.BETWEEN, max(records), since_ns=now) for w in range(spec.num_workers)}
    return RunUpdate(headers, listings, lives, [r for step in sorted(records) for r in records[step]], now_ns=now)


def view_of(
    workers: int = 4,
    microbatches: int = 8,
    schedule: str = "1f1b",
    lives: dict[int, Live] | None = None,
    **options: Any,
) -> View:
    spec = make_spec(schedule, workers, microbatches, {})
    view = View()
    view.take(news_of(spec, records_of(spec, **options), lives))
    return view
