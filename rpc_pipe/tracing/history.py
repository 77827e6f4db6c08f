"""The last steps of all workers of a run, and statistics of them. Loads without torch."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from ..dependency import ConfigError, Spec
from ..workers.hooks import StepRecord
from .boards import RunUpdate
from .listed_relation import spec_of_listings
from .lost_time import LostTime, attribute_lost_time
from .trace import Trace

#: steps kept in full, and points of the loss curve
KEPT_STEPS, _KEPT_LOSSES = 64, 20_000
#: number of recent steps for statistics of the present
RECENT = 8
#: how often, at most, the lost time is attributed: it simulates the schedule
_ATTRIBUTE_EVERY_S = 2.0


class History:
    """Collects updates of a run, of any source, and computes statistics.

    Args:
        keep: number of steps to keep.
    """

    def __init__(self, keep: int = KEPT_STEPS) -> None:
        self._keep = keep
        self.headers: dict[int, dict[str, Any]] = {}
        #: listing of the program by worker and number of microbatches
        self.listings: dict[tuple[int, int], dict[str, Any]] = {}
        self.clock_error_ms = 0.0
        #: (step, the loss of its batch)
        self.losses: deque[tuple[int, float]] = deque(maxlen=_KEPT_LOSSES)
        self._steps: dict[int, dict[int, StepRecord]] = {}
        self._specs: dict[int, Spec | None] = {}
        self._lost: tuple[float, int, LostTime | None] = (0.0, -1, None)

    def take(self, update: RunUpdate) -> None:
        """Add an update."""
        before = self.pipelines
        if update.headers.keys() - self.headers.keys() or update.listings.keys() - self.listings.keys():
            self._specs.clear()
        newest = max(update.headers.values(), key=lambda header: header["clock_ns"], default={"num_workers": 0})
        # An earlier pipeline of the same process may have had more workers.
        self.headers = {worker: found for worker, found in update.headers.items() if worker < newest["num_workers"]}
        self.listings = dict(update.listings)
        self.clock_error_ms = update.clock_error_ms
        if any(before.get(worker, made) != made for worker, made in self.pipelines.items()):
            self._steps.clear()
            self.losses.clear()
            self._specs.clear()
            self._lost = 0.0, -1, None
        for record in (record for record in update.records if record.worker in self.headers):
            self._steps.setdefault(record.step, {})[record.worker] = record
            if len(self._steps[record.step]) == self.num_workers:
                self._completed(record.step)
        while len(self._steps) > self._keep:
            del self._steps[min(self._steps)]

    def _completed(self, step: int) -> None:
        """Handle a step that all workers have finished."""
        self.losses.append((step, next(iter(self._steps[step].values())).loss))

    def note(self, text: str, *, warning: bool = False) -> None:
        """Report a finding; ignored here, logged by a view."""

    @property
    def num_workers(self) -> int:
        """The number of workers of the run, visible or not."""
        return next((header["num_workers"] for header in self.headers.values()), 0)

    @property
    def spec(self) -> Spec | None:
        """The schedule, with the pipeline's number of microbatches; None until it is known."""
        header = next(iter(self.headers.values()), None)
        return None if header is None else self._spec_of(header["microbatches"])

    @property
    def pipelines(self) -> dict[int, int]:
        """By worker, an id of its pipeline, as steps of a process's next pipeline count from 0 again."""
        return {worker: header["clock_ns"] for worker, header in self.headers.items()}

    def length_ms(self, step: int) -> float:
        """Return the time from the first start to the last end of a complete step."""
        records = self._steps[step].values()
        return (max(r.end_ns for r in records) - min(r.start_ns for r in records)) / 1e6

    def complete_steps(self, count: int) -> list[int]:
        """Return the last `count` steps that all workers have finished."""
        complete = [step for step in sorted(self._steps) if len(self._steps[step]) == self.num_workers]
        return complete[-count:] if count else complete

    def records(self, step: int) -> list[StepRecord]:
        """Return the records of a complete step, in order of workers."""
        return [record for _, record in sorted(self._steps[step].items())]

    def trace(self, count: int = RECENT) -> Trace | None:
        """Return the last `count` complete consecutive steps with equal numbers of microbatches; 0: all that there are.

        None if there is none, or the schedule is unknown. A batch of few rows has fewer microbatches; steps of the most
        common number are returned.
        """
        steps = self.complete_steps(0)
        sizes = {step: self._num_microbatches(step) for step in steps[-max(count, RECENT) :]}
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
        """Return these complete steps; None if the schedule for their number of microbatches is unknown."""
        spec = self._spec_of(self._num_microbatches(steps[0])) if steps else None
        if spec is None:
            return None
        run = next(iter(self.headers.values())).get("script", "")
        return Trace(spec, {step: self.records(step) for step in steps}, self.clock_error_ms, run)

    def _num_microbatches(self, step: int) -> int:
        return next(iter(self._steps[step].values())).num_microbatches

    def _spec_of(self, num_microbatches: int) -> Spec | None:
        """Return the schedule for a number of microbatches, from the listings of all workers; None: not all are there.

        It is taken from listings for more microbatches if there are none for this number.
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

    def lost(self, *, fresh: bool = False) -> LostTime | None:
        """Return the lost time of the recent steps; at most two seconds old, or `fresh`."""
        at, step, lost = self._lost
        complete = self.complete_steps(1)
        if complete and complete[0] != step and (fresh or time.monotonic() > at + _ATTRIBUTE_EVERY_S):
            trace = self.trace(RECENT + 1)
            if trace is not None:
                headers = [header for _, header in sorted(self.headers.items())]
                one_machine = len({header["host"] for header in headers}) == 1
                cores = headers[0].get("cores") if one_machine and headers[0]["device"] == "cpu" else None
                seen_here = all("clock_error_ms" not in header for header in headers)  # others' name their mirror
                one = seen_here and len(headers) > 1 and len({header["process"] for header in headers}) == 1
                lost = attribute_lost_time(trace, [header["shards"] for header in headers], cores, one)
                self._lost = time.monotonic(), complete[0], lost
        return lost

    def step_ms(self) -> float | None:
        """Return the median time from the end of a step to the end of the next, over the recent steps."""
        steps = self.complete_steps(RECENT + 1)
        ends = [max(record.end_ns for record in self._steps[step].values()) for step in steps]
        if len(ends) < 2:
            return self.length_ms(steps[0]) if steps else None
        return median(after - before for before, after in pairwise(ends)) / 1e6

    def throughput(self) -> tuple[float, str] | None:
        """Return tokens, or else rows, a second over the recent steps, and which of them."""
        step_ms, steps = self.step_ms(), self.complete_steps(RECENT)
        if not steps or not step_ms:
            return None
        records = [self.records(step)[0] for step in steps]
        tokens = sum(record.tokens for record in records)
        count = tokens or sum(record.rows for record in records)
        return 1e3 * count / (len(records) * step_ms), "tokens" if tokens else "rows"
