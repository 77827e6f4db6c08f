"""The view of a run: the last steps of all workers, their states, a log, and statistics. Loads without torch."""

import math
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..workers.hooks import StepRecord
from .board import Live, State
from .run_boards import RunBoards, RunUpdate, in_collective
from .stall_report import behind, duration, roll_call, running, waiting_chain

#: most stages that are described one by one
_MOST_STAGES = 8


def layout(headers: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the layout in a line, from the headers of all processes; "" before all of them hold their stages."""
    first = next(iter(headers.values()), {})
    workers, members = first.get("num_workers", 0), first.get("members", 1)
    places = first.get("places", workers)
    if not headers or len(headers) < workers * members or not all(each.get("parameters") for each in headers.values()):
        return ""
    replicas, stages = first["replicas"], dict[int, tuple[int, int]]()  # stage -> its blocks and its parameters
    for header in headers.values():
        for (stage, _, blocks, *_), parameters in zip(header["shards"], header["parameters"], strict=True):
            stages[stage] = blocks, parameters
    parts = [f"{len(stages)} stage{'s' * (len(stages) != 1)}"]
    if places // replicas != len(stages):
        parts[0] += f" on {places // replicas} workers"
    parts += [f"{count} {what}" for count, what in ((replicas, "replicas"), (members, "members")) if count > 1]
    count = f"{len(headers)} of {places}" if places > len(headers) else str(len(headers))
    whole = f"{count} process{'es' * (places > 1)}: {' x '.join(parts)}"
    zero = f", zero {first['zero']}" if first["zero"] else ""
    told, begin = [], 0
    for stage, (blocks, parameters) in sorted(stages.items()):
        which = f"block {begin}" if blocks == 1 else f"blocks {begin}-{begin + blocks - 1}"
        told.append(f"stage {stage}: {which if blocks else 'no block'}, {_amount(parameters)} parameters")
        begin += blocks
    if more := len(told) - _MOST_STAGES:
        told = [*told[:_MOST_STAGES], f"{more} more stages"] if more > 0 else told
    return "; ".join([whole + zero, *told])


def _amount(number: int) -> str:
    units = (("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1))
    return next((f"{number / size:.3g} {unit}".strip() for unit, size in units if number >= size), "0")


#: steps kept in full, and points of the loss curve
KEPT_STEPS, _KEPT_LOSSES = 64, 20_000
#: steps with a held-out loss that is kept
_KEPT_EVALUATED = 1_000
#: number of recent steps for statistics of the present
RECENT = 8
#: a stall: nothing has finished for this many seconds, and this many times a usual step
_STALL_S, _STALL_STEPS = 10.0, 10
#: least ns of training to know the waits for cores
_LEAST_NS = 5 * 10**8
#: factor of both if no worker has been called, and in the first step
_MORE_BETWEEN = 6
#: a step is reported as slow above this multiple of the usual time, and this many ms more
_SLOW_STEP, _SLOWER_MS = 2.0, 50.0


def _core_time(process: str) -> tuple[int, int] | None:
    """Return the time of a process of this host, and the part that it waited for a core, in ns.

    None: the kernel does not measure it (proc(5), schedstat), or the process has ended.
    """
    with suppress(OSError, ValueError, IndexError):
        waited = int(Path("/proc", process.partition("/")[0], "schedstat").read_text().split()[1])
        return time.monotonic_ns(), waited
    return None


class View:
    """Collects updates of a run, of any source, and computes statistics.

    Args:
        keep: number of steps to keep.
    """

    def __init__(self, keep: int = KEPT_STEPS) -> None:
        self._keep = keep
        self.latest = RunUpdate()
        #: constant properties, by process, of the latest pipeline
        self.headers: dict[int, dict[str, Any]] = {}
        #: (step, the loss of its batch)
        self.losses: deque[tuple[int, float]] = deque(maxlen=_KEPT_LOSSES)
        #: by step, the mean of the evaluations after it, and their number
        self._held_out: dict[int, tuple[float, int]] = {}
        #: log: (seconds since the epoch, message, whether it is a warning)
        self.events: deque[tuple[float, str, bool]] = deque(maxlen=200)
        #: whether the run stalls
        self.stalled, self._steps = False, dict[int, dict[int, StepRecord]]()
        #: by process, an id of its pipeline: steps of its next one count from 1 again
        self.pipelines: dict[int, int] = {}
        #: what its readers have derived from the steps of this epoch (`tracing.trace`)
        self.derived: dict[Any, Any] = {}
        #: the epoch of an elastic job, and the first step that it has completed
        self.epoch, self.first_step = 0, 0
        self._progress_ns = self._longest_ns = 0
        #: by process, its first and last `core_time` while it trains
        self._core_times: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        #: the line about a first step that takes long; "": it does not
        self.first_step_line = ""

    # --- news

    def take(self, update: RunUpdate) -> None:
        """Add an update."""
        before, self.latest, earlier, before_epoch = self.latest, update, self.pipelines, self.epoch
        for worker in sorted(update.gone - before.gone):
            left = update.lives[worker].state is State.LEFT
            self.note(f"worker {worker} has {'ended' if left else 'gone'}", warning=not left)
        self.epoch = max((header.get("epoch", 0) for header in update.headers.values()), default=0)
        now = {rank: header for rank, header in update.headers.items() if header.get("epoch", 0) == self.epoch}
        newest = max(now.values(), key=lambda header: header["clock_ns"], default={"num_workers": 0})
        # An earlier pipeline of the same process may have had more workers.
        self.headers = {rank: found for rank, found in now.items() if found["worker"] < newest["num_workers"]}
        self.pipelines = {
            rank: earlier[rank] if found.get("newcomer") and rank in earlier else found["clock_ns"]
            for rank, found in self.headers.items()
        }
        if any(earlier.get(rank, made) != made for rank, made in self.pipelines.items()):
            self.losses.clear()
            self._held_out.clear()
            before_epoch = -1
        if self.epoch != before_epoch:
            self._steps.clear()
            self.derived.clear()
            self.first_step = 0
        here = {header["worker"] for header in self.headers.values()}
        for record in (record for record in update.records if record.worker in here):
            self._longest_ns = max(self._longest_ns, record.end_ns - record.start_ns)
            self._steps.setdefault(record.step, {})[record.worker] = record
            if len(self._steps[record.step]) == self.num_workers:
                self._completed(record.step)
        while len(self._steps) > self._keep:
            del self._steps[min(self._steps)]
        for step, loss in update.evaluations:
            mean, count = self._held_out.get(step, (0.0, 0))
            self._held_out[step] = mean + (loss - mean) / (count + 1), count + 1
            if len(self._held_out) > _KEPT_EVALUATED:
                del self._held_out[next(iter(self._held_out))]
        self.events.extend(update.events)
        if update.ending not in (None, before.ending):
            self.note(f"the run {update.ending}".splitlines()[0], warning=True)
        if update.dropped and not before.dropped:
            self.note("some steps are left out: they come too fast, or are too large", warning=True)
        for rank, found in self.headers.items() if self._steps else ():
            is_here = found["host"] == socket.gethostname() and "clock_error_ms" not in found
            if is_here and (core_time := _core_time(found["process"])) is not None:
                self._core_times[rank] = self._core_times.get(rank, (core_time, core_time))[0], core_time
        self._watch_for_stall()

    def note(self, text: str, *, warning: bool = False) -> None:
        """Add a message to the log."""
        self.events.append((time.time(), text, warning))

    def _completed(self, step: int) -> None:
        """Handle a step that all workers have finished."""
        before = self.losses[-1][1] if self.losses else 0.0
        self.first_step = self.first_step or step
        self.losses.append((step, loss := next(iter(self._steps[step].values())).loss))
        if not math.isfinite(loss) and math.isfinite(before):
            self.note(f"step {step}: the loss is {loss}", warning=True)
        times = [self.length_ms(s) for s in self.complete_steps(RECENT)]
        if len(times) >= RECENT and times[-1] > max(_SLOW_STEP * median(times), median(times) + _SLOWER_MS):
            self.note(f"step {step}: {times[-1]:.0f} ms of actions, usually {median(times):.0f}", warning=True)

    def _watch_for_stall(self) -> None:
        lives = self.latest.lives.values()
        latest = max((live.since_ns for live in lives), default=0)
        idle = all(live.state in (State.STARTING, State.LEFT) for live in lives)
        patience = max(_STALL_S * 1e9, _STALL_STEPS * self._longest_ns)
        if all(live.state is State.BETWEEN for live in lives):  # perhaps saving or loading data
            patience *= _MORE_BETWEEN
        elif not self._longest_ns and (worker := self.culprit()) is not None:  # a model is looked at, or compiled
            for_ns = self.latest.now_ns - self.latest.lives[worker].since_ns
            if not self.first_step_line and self.latest.now_ns - latest > patience:
                self.first_step_line = f"worker {worker} runs its first step, for {duration(for_ns)} so far"
                self.note(self.first_step_line)
            patience *= _MORE_BETWEEN
        if latest > self._progress_ns or idle or self.latest.gone.issuperset(self.latest.lives):
            self._progress_ns = max(latest, self._progress_ns)
            self.stalled = False
        elif not self.stalled and self.latest.now_ns - latest > patience:
            self.stalled = True
            self.note(f"nothing has finished for {duration(self.latest.now_ns - latest)}", warning=True)
            for line in self.roll_call():
                self.note(line, warning=True)

    def roll_call(self, culprit: int | None = None) -> list[str]:
        """Return the lines of the stall report; none if no worker can be seen."""
        lives, last_host, members = self._stall
        return roll_call(lives, last_host, self.latest.now_ns, members, culprit) if lives else []

    def culprit(self) -> int | None:
        """Return the worker at the end of the chain of waits; of its members, the one that is behind."""
        lives, last_host, members = self._stall
        return behind(lives, waiting_chain(lives, last_host)[-1], members) if lives else None

    def hanging(self, boards: RunBoards) -> tuple[int | None, list[str]]:
        """Return the process that hangs, by the boards in a run's folder, and lines with its stack."""
        lives, _, members = self._stall
        culprit, several = self.culprit(), running(lives) if members > 1 else []
        found = {rank: boards.stacks(rank) for rank in [culprit, *several]}
        if several:  # a member in a collective waits for another one
            culprit = next((rank for rank, lines in found.items() if lines and not in_collective(lines)), culprit)
        return culprit, found[culprit]

    @property
    def _stall(self) -> tuple[Mapping[int, Live], int, int]:
        """The states, a process of the last stage, which has the result, and how many processes are a worker."""
        last = {rank: max((s for s, *_ in header["shards"]), default=-1) for rank, header in self.headers.items()}
        return self.latest.lives, max(last, key=last.__getitem__, default=0), self.members

    # --- the run

    @property
    def header(self) -> dict[str, Any]:
        """The constant properties of the first process; empty before one is seen."""
        return next(iter(self.headers.values()), {})

    @property
    def num_workers(self) -> int:
        """The number of workers of the run, visible or not."""
        return int(self.header.get("num_workers", 0))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the workers that can be seen; some of an elastic job may be missing."""
        return sorted({rank // header.get("members", 1) for rank, header in self.headers.items()})

    @property
    def members(self) -> int:
        """The number of processes that form a worker together."""
        return int(self.header.get("members", 1))

    # --- steps

    def complete_steps(self, count: int) -> list[int]:
        """Return the last `count` steps that all workers have finished; 0: all that there are."""
        return [step for step in sorted(self._steps) if len(self._steps[step]) == self.num_workers][-count:]

    def records(self, step: int) -> list[StepRecord]:
        """Return the records of a complete step, in order of workers."""
        return [record for _, record in sorted(self._steps[step].items())]

    def length_ms(self, step: int) -> float:
        """Return the time from the first start to the last end of a complete step."""
        return step_ms([self.records(step)])

    def took_ms(self, step: int) -> float:
        """Return the time from the end of the step before to the end of a complete step."""
        ends = {record.worker: record.end_ns for record in self._steps.get(step - 1, {}).values()}
        return max(r.end_ns - ends.get(r.worker, r.start_ns) for r in self.records(step)) / 1e6

    def step_ms(self) -> float | None:
        """Return the median time from the end of a step to the end of the next, over the recent steps."""
        steps = self.complete_steps(RECENT + 1)
        return step_ms([self.records(step) for step in steps]) if steps else None

    def throughput(self) -> tuple[float, str] | None:
        """Return tokens, or else rows, a second over the recent steps, and which of them."""
        if not (ms := self.step_ms()):
            return None
        records = [self.records(step)[0] for step in self.complete_steps(RECENT)]
        tokens = sum(record.tokens for record in records)
        count = tokens or sum(record.rows for record in records)
        return 1e3 * count / (len(records) * ms), "tokens" if tokens else "rows"

    @property
    def held_out_losses(self) -> list[tuple[int, float]]:
        """(step, mean of the evaluations after it)."""
        return [(step, mean) for step, (mean, _) in self._held_out.items()]

    @property
    def core_wait(self) -> float:
        """The largest share of its time that a worker waited for a core, by the kernel; 0.0: it is not known."""
        pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in self._core_times.values()]
        return max((waited / took for took, waited in pairs if took > _LEAST_NS), default=0.0)

    @property
    def with_padding(self) -> bool:
        """Whether the tokens of the last step count padding too."""
        return any(self.records(step)[0].with_padding for step in self.complete_steps(1))


def step_ms(steps: Sequence[Sequence[StepRecord]]) -> float:
    """Return the median time from the end of a step to the end of the next; of a single step its makespan."""
    ends = [max(record.end_ns for record in records) for records in steps]
    times = [after - before for before, after in pairwise(ends)]
    return median(times or [ends[0] - min(record.start_ns for record in steps[0])]) / 1e6


def describe_stall(folder: Path) -> str:
    """Return the report on the workers with boards in `folder`, with the stacks of the hanging one."""
    boards, view = RunBoards(folder), View()
    view.take(boards.look())
    calls = [f"  {line}" for line in view.roll_call()]
    return "\n".join(["what the workers of this host do:", *calls, *view.hanging(boards)[1]]) if calls else ""
