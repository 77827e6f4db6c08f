"""Attribution of a step's lost time to causes, with the largest in a sentence.

The limit is the workers' work at normal speed, shared evenly and without waits. The schedule is simulated with the
measured times, adding one cause at a time, and each cause is charged with the time that it adds:

    limit                  all work / workers
    + bubble               the schedule with equal stages, free transfers
    + imbalance            with the work of each stage
    + slow worker          with the speed of each worker
    + unequal microbatches with the length of each microbatch
    + link                 with the measured transfer times, beyond the runtime's part
    + data                 the time between steps, and the time of reading a batch within a step
    + overhead             the rest up to the measured time: the runtime, jitter

A worker counts as slow, and not as having more work, if stages like its stages take less time elsewhere.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import itemgetter
from statistics import fmean, median, median_low

from ..boards.view import RECENT, View
from ..dependency import Action, Kind
from ..planning.simulator import Cost, Link, simulate
from ..planning.unequal import balanced
from ..schedules import name_of
from .trace import Trace, by_length, recent_trace, transfers

#: the cause that another order of microbatches makes smaller
UNEQUAL = "unequal microbatches"
#: the runtime's part of a transfer: serialisation, and waking threads (bench/hops.py)
_RUNTIME_HOP_MS = 1.0
#: a payload between CPU workers of one machine that takes less waits for a core, not for a link
_SLOW_HERE_MS = 10.0
#: least ratio of times for a worker to count as slow; less is noise
_SLOW = 1.1
#: number of steps simulated in sequence, as steps may overlap
_STEPS = 3
#: how often, at most, the lost time of a view is attributed
_ATTRIBUTE_EVERY_S = 2.0
#: share of a step below which a cause is not named
_NEGLIGIBLE = 0.04
#: share of the waits between steps that reading batches must explain to be named as their cause
_KNOWN = 0.5
#: the bubble in a sentence
_BUBBLE = "the schedule's own bubble"
#: an action is long from this multiple of its usual time on, and small below this number of ms
_LONG, _SMALL_MS = 3, 3.0
#: by cause of waiting for data: the awaited work, and advice
_DATA = {
    "": ("or for what else is done there", "load batches ahead, for example with the DataLoader's num_workers"),
    "disk": ("for the disk", "read from a faster one, or give the loader more memory"),
    "network": ("for samples to come over the network", "copy them to this machine's disk before"),
    "decode": ("for samples to be decoded", "store them decoded, as tokens or arrays"),
}


@dataclass(frozen=True)
class LostTime:
    """A step's time, in ms. The parts and the limit add up to the step."""

    step_ms: float
    limit_ms: float
    #: the causes with their ms, in the order above
    parts: dict[str, float]
    #: the cause of waiting for data: disk, network or decode; empty: unknown
    data_cause: str = ""
    #: the largest causes, with advice
    sentence: str = ""

    def as_json(self) -> dict[str, float | str]:
        """Return all values by name, for JSON."""
        parts = {f"{cause.replace(' ', '_')}_ms": ms for cause, ms in self.parts.items()}
        own = {"data_cause": self.data_cause, "sentence": self.sentence, "line": self.line()}
        return {"step_ms": self.step_ms, "limit_ms": self.limit_ms, **parts, **own}

    def line(self) -> str:
        """Return the shares of a step in one line."""
        shares = {cause: ms / self.step_ms for cause, ms in {"work": self.limit_ms, **self.parts}.items()}
        return ", ".join(f"{cause} {_percent(share)}" for cause, share in shares.items() if share >= 0.005)


def lost_time(view: View, *, fresh: bool = False) -> LostTime | None:
    """Return the lost time of the recent steps; at most two seconds old, or `fresh`."""
    kept: tuple[float, int, LostTime | None] = view.derived.get("lost", (0.0, -1, None))
    at, step, lost = kept
    complete = view.complete_steps(1)
    if complete and complete[0] != step and (fresh or time.monotonic() > at + _ATTRIBUTE_EVERY_S):
        if (trace := recent_trace(view, RECENT + 1)) is not None:
            firsts = {header["worker"]: header for _, header in sorted(view.headers.items(), reverse=True)}
            headers = [firsts[worker] for worker in sorted(firsts)]
            one_machine = len({header["host"] for header in headers}) == 1
            cores = headers[0].get("cores") if one_machine and headers[0]["device"] == "cpu" else None
            # Copied headers name the process that has copied them.
            seen_here = all("clock_error_ms" not in header for header in headers)
            one = seen_here and len(headers) > 1 and len({header["process"] for header in headers}) == 1
            shards = [header["shards"] for header in headers]
            lost = Attribution(trace, shards, cores, one, view.core_wait).lost()
            view.derived["lost"] = time.monotonic(), complete[0], lost
    return lost


@dataclass
class Attribution:
    """Attributes the time of a step of `trace`, which should have several steps.

    Args:
        shards: of each worker, (stage, route, number of layers, form) of its shards; stages of one form should take
            equally long.
        cores: cores of the machine, if all workers compute on the CPU of one machine.
        one_process: whether the workers are threads of one process, which take turns.
        core_wait: share of the time that a worker waited for a core, by the kernel.
    """

    trace: Trace
    shards: Sequence[Sequence[Sequence[int]]]
    cores: int | None = None
    one_process: bool = False
    core_wait: float = 0.0

    def __post_init__(self) -> None:
        trace, cores = self.trace, self.cores
        self._spec, self._usual, self._step_ms = trace.spec, trace.cost(), trace.step_ms
        self._numbers = trace.numbers or range(trace.spec.num_workers)
        self._core_wait_ms = self.core_wait * trace.step_ms
        self._records = [trace.steps[step] for step in sorted(trace.steps)]
        #: of the last steps, the length of each microbatch relative to the median of all; empty: they are equal
        self._lengths = trace.lengths(_STEPS)
        #: mean length: actions take the median times so long on average
        self._mean = fmean(chain.from_iterable(self._lengths)) if self._lengths else 1.0
        #: by worker, the ratio of its times to other workers' times for stages of the same form
        self._slowness = self._compare()
        #: (source, target) -> median transfer time in ms; and the least of a slow link
        self._delays = {pair: median(way.ms for way in found) for pair, found in transfers(self._records).items()}
        self._link_ms, self._waits = 0.0 if cores is None else _SLOW_HERE_MS, self._data_waits()
        #: number of cores, if workers share them
        self._crowded = cores if cores and cores < trace.spec.num_workers else None
        self._actions = [r.action for record in self._records[-1] for r in record.actions]

    def lost(self) -> LostTime:
        """Return the lost time."""
        work: dict[Kind, list[float]] = defaultdict(list)
        for action in self._actions:
            work[action.kind].append(self._nominal(action))
        mean = {kind: sum(costs) / len(costs) for kind, costs in work.items()}
        limit = sum(map(sum, work.values())) / self._spec.num_workers
        own = min(_RUNTIME_HOP_MS, min(self._delays.values(), default=0.0))
        excess = {pair: Link(delay - own) for pair, delay in self._delays.items() if delay > max(own, self._link_ms)}
        equal = self._simulate(lambda action: mean.get(action.kind, 0.0))
        uneven = self._simulate(self._nominal)
        slow = self._simulate(self._actual)
        charged = {
            "bubble": equal - limit,
            "imbalance": uneven - equal,
            "slow worker": slow - uneven,
            UNEQUAL: median(map(self._ragged, self._lengths)) - slow if self._lengths else 0.0,
            "link": self._simulate(self._actual, excess) - slow,
            "data": max(self._waits, default=0.0),
        }
        parts = {cause: max(0.0, ms) for cause, ms in charged.items()}
        # A simulation with medians may exceed the measured time; the parts are then scaled down alike.
        room = max(0.0, self._step_ms - limit)
        scale = min(1.0, room / max(sum(parts.values()), 1e-9))
        parts = {cause: scale * ms for cause, ms in parts.items()}
        parts["overhead"] = max(0.0, room - sum(parts.values()))
        lost = LostTime(self._step_ms, min(limit, self._step_ms), parts, self._data_cause())
        return replace(lost, sentence=self._sentence(lost))

    def _sentence(self, lost: LostTime) -> str:
        """Return the two largest causes, the larger first, each with advice."""
        if len(self._records) < _STEPS:
            return f"not known, as it takes {_STEPS} equal steps in a row to name a cause"
        shares = {cause: ms / lost.step_ms for cause, ms in lost.parts.items()}
        totals: dict[tuple[str, str], float] = defaultdict(float)
        for cause, share in shares.items():
            if share >= _NEGLIGIBLE:
                totals[self._blame(cause, lost)] += share
        most = sorted(totals.items(), key=itemgetter(1), reverse=True)[:2]
        found = [f"{what}, which costs about {_percent(share)} of a step: {advice}" for (what, advice), share in most]
        if not {what for what, _ in totals} - {_BUBBLE}:
            reached = _percent(lost.limit_ms / lost.step_ms + shares["bubble"])
            found.insert(0, f"the run reaches {reached} of what {name_of(self._spec)} allows")
        return "; ".join(found)

    def _blame(self, cause: str, lost: LostTime) -> tuple[str, str]:
        """Return the source of a cost, and advice."""
        if cause == "bubble":
            return _BUBBLE, "more microbatches make it smaller, and rpc-pipe compare shows other schedules"
        if cause == "data":
            worker, waits = _largest(self._waits)
            what, advice = _DATA[lost.data_cause]
            if not lost.data_cause and (self._crowded is not None or self._core_wait_ms > _KNOWN * waits):
                advice = "processes on fewer cores take turns, the script's own work between steps, too"
            return f"worker {self._numbers[worker]} waits {waits:.1f} ms for data between steps ({what})", advice
        if self.one_process:
            what = "the workers are threads of one process and take turns"
            return what, "that is for looking and debugging; rpc-pipe run gives each a process"
        if cause == UNEQUAL:
            return self._unequal()
        if self._crowded is not None:
            # A worker that waits for a core looks slow, and so does a link to it: which one changes from run to run.
            workers = self._spec.num_workers
            return "the workers wait for a core", f"{workers} workers share {self._crowded} cores of one machine"
        if cause != "imbalance" and self._core_wait_ms > _KNOWN * lost.parts[cause]:
            share = _percent(self._core_wait_ms / self._step_ms)
            return f"a worker waits for a core in {share} of the time", "other programs hold the cores"
        if cause == "slow worker":
            worker, times = _largest(self._slowness)
            what = f"worker {self._numbers[worker]} takes {times:.1f} x as long as others for stages of the same form"
            return what, "it is slow, unless they are heavier"
        if cause == "imbalance":
            busy = [0.0] * self._spec.num_workers
            for action in self._actions:
                busy[self._spec.worker(action)] += self._actual(action)
            worker, longest = _largest(busy)
            which = f"those of worker {self._numbers[worker]} {longest / max(median_low(busy), 1e-9):.1f} x the median"
            return f"stages or actions take unequally long, {which}", "rpc-pipe plan finds cuts, and sizes of slices"
        if cause == "link":
            link, ms = max(self._delays.items(), key=lambda link: link[1])
            source, target = (self._numbers[worker] for worker in link)
            what = f"payloads take {ms:.1f} ms from worker {source} to worker {target}"
            return what, "a slow link; eager-1f1b or a wider window hides it for more activations"
        return self._overhead(lost.parts["overhead"])

    def _overhead(self, lost_ms: float) -> tuple[str, str]:
        """Return the source of the time that no other cause explains, and advice."""
        runs = (run for records in self._records for record in records for run in record.actions)
        alike = [run for run in runs if run.action.kind.per_microbatch]
        lengths = [((run.end_ns - run.start_ns) / 1e6, self._actual(run.action)) for run in alike]
        long = [took - usual for took, usual in lengths if took > _LONG * usual + 1]
        a_step = sum(long) / len(self._records) / self._spec.num_workers
        if a_step > lost_ms * _KNOWN:
            what = f"{len(long)} of {len(lengths)} actions took more than {_LONG} x their usual time"
            first, last = ([r.observations for r in self._records[at]] for at in (0, -1))
            if any(after > before for before, after in zip(first, last, strict=True)):  # not in a model's first look
                return what, "new shapes are looked at once: pad sequences to a few lengths"
            return what, "other programs ran on the cores, or memory was short"
        typical, count = median(usual for _, usual in lengths), len(lengths) // len(self._records)
        if typical < _SMALL_MS:
            what = f"the runtime itself handles {count} actions of {typical:.1f} ms a step"
            return what, "larger or fewer microbatches make actions longer"
        what = f"waits between {count} actions of {typical:.1f} ms, beyond those of the schedule"
        return what, "times vary, or other programs run on the cores; rpc-pipe run --html shows where"

    def _unequal(self) -> tuple[str, str]:
        """Return how unequal microbatches are, and advice: the gain of another order, if there is one."""
        shortest, longest = (found(map(found, self._lengths)) / self._mean for found in (min, max))
        what = f"microbatches are {shortest:.1f} to {longest:.1f} x as long as their mean"
        orders = [(given, balanced(self._spec.unsliced(), given)) for given in self._lengths]
        gains = [1 - self._ragged([given[m] for m in order]) / self._ragged(given) for given, order in orders]
        if (gain := median(gains)) >= 0.01:
            return what, f"--microbatch-order balanced would take {_percent(gain)} off"
        return what, "rows of similar length in a microbatch make them more equal (batches_by_length)"

    def _ragged(self, lengths: Sequence[float]) -> float:
        """Return the simulated time of a step of microbatches of these lengths."""
        return self._simulate(by_length(self._spec, self._usual, lengths))

    def _actual(self, action: Action) -> float:
        return self._usual(action) * (self._mean if action.kind.per_microbatch else 1.0)

    def _nominal(self, action: Action) -> float:
        slowness = self._slowness[self._spec.worker(action)]
        return self._actual(action) / (slowness if slowness >= _SLOW else 1.0)

    def _simulate(self, cost: Cost, links: Mapping[tuple[int, int], Link] | None = None) -> float:
        return simulate(self._spec, cost, steps=_STEPS, links=links).step_time

    def _data_waits(self) -> list[float]:
        """Return the median ms, by worker, that its calls were later than they could have been."""
        late: dict[int, list[float]] = defaultdict(list)
        for before, after in pairwise(self._records):
            made = {run.action: run.end_ns for record in after for run in record.actions}
            for last, record in zip(before, after, strict=True):
                # The time of production, not of arrival, since a late worker has not asked for the payloads.
                needs = self._spec.data(record.actions[0].action) if record.actions else ()
                ready = max([last.end_ns, *(made[need] for need in needs if need in made)])
                late[record.worker].append(max(0.0, (record.start_ns - ready) / 1e6))
        # Reading a batch while a step drains delays it, too.
        read = {w: median(r.data_wait_ns / 1e6 for rs in self._records for r in rs if r.worker == w) for w in late}
        return [max(median(late[worker]), read[worker]) for worker in sorted(late)]

    def _data_cause(self) -> str:
        """Return the main cause of waiting for batches, if reading them explains the waits between steps."""
        waited: Counter[str] = Counter()
        for record in chain.from_iterable(self._records):
            waited[record.data_cause] += record.data_wait_ns
        ((worst, ns),) = waited.most_common(1)
        between = max(self._waits, default=0.0) * len(self._records)
        return worst if ns / 1e6 > _KNOWN * between else ""

    def _compare(self) -> list[float]:
        """Return the ratios, by worker, of its times to other workers' times, for forms of stages that both have.

        1 where that is not known.
        """
        spec, times, ratios = self._spec, defaultdict[int, dict[int, float]](dict), defaultdict[int, list[float]](list)
        first = {spec.route(m): m for m in reversed(range(spec.num_microbatches))}
        for worker, own in enumerate(self.shards):
            for stage, route, _, form in own:
                times[form][worker] = sum(map(self._actual, spec.actions(stage, first.get(route, 0))))
        for by_worker in times.values():
            usual = median_low(by_worker.values()) if len(by_worker) > 1 else 0.0
            for worker, ms in by_worker.items() if usual else ():
                ratios[worker].append(ms / usual)
        return [max(1.0, median(ratios.get(worker, [1.0]))) for worker in range(spec.num_workers)]


def _largest(values: Sequence[float]) -> tuple[int, float]:
    """Return the worker with the largest value, and that."""
    return max(enumerate(values), key=lambda found: found[1])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
