"""Attribution of a step's lost time to causes, with the worst one in a sentence.

The limit is the workers' work at normal speed, spread evenly and without waits. The schedule is simulated with the
measured times, adding one cause at a time, and each cause is charged with the time that it adds:

    limit                  all work / workers
    + bubble               the schedule with equal stages, free transfers
    + imbalance            with each stage's own work
    + slow worker          with each worker's own speed
    + link                 with the measured transfer times, beyond the runtime's own
    + data                 the time between steps, and the time of reading a batch within a step
    + overhead             the rest up to the measured time: the runtime, jitter

A worker counts as slow, and not as having more work, if stages like its own take less time elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, median_low

from ..dependency import Action, B, F, Kind
from ..planning.simulator import Cost, Link, simulate
from ..schedules import name_of
from .trace import Trace, transfers

#: the runtime's own part of a transfer: serialisation, and waking threads (bench/hops.py)
_RUNTIME_HOP_MS = 1.0
#: ratio of times from which a worker counts as slow; less is noise
_SLOW = 1.1
#: ratio of computing times from which a worker counts as busier than others
_BUSIER = 1.05
#: number of steps simulated in sequence, as steps may overlap
_STEPS = 3
#: share of a step below which a cause is not named
_NEGLIGIBLE = 0.04
#: share of the waits between steps that reading batches must explain to be named as their cause
_KNOWN = 0.5
#: by cause of waiting for data: what is waited for, and advice
_DATA = {
    "": (
        "or for what else the script does there",
        "load batches ahead, for example with the DataLoader's num_workers",
    ),
    "disk": ("for the disk", "read from a faster one; `rpc-pipe data` tells its speed"),
    "network": ("for shards to come over the network", "copy the shards to this machine's disk before"),
    "decode": ("for samples to be decoded", "store them decoded, as tokens or arrays, or decode in more threads"),
}
#: overhead is named only if every other cause is less than this share of it, since nothing more is known of it
_VAGUE = 0.5


@dataclass(frozen=True)
class LostTime:
    """A step's time, in ms. The parts and the limit add up to the step."""

    step_ms: float
    limit_ms: float
    #: the causes with their ms, in the order in which they are charged
    parts: dict[str, float]
    #: what data are waited for: disk, network or decode; empty: unknown
    data_cause: str = ""
    #: the worst cause, with advice
    sentence: str = ""

    def as_json(self) -> dict[str, float | str]:
        """Return all values by name, for JSON."""
        parts = {f"{cause.replace(' ', '_')}_ms": ms for cause, ms in self.parts.items()}
        own = {"data_cause": self.data_cause, "sentence": self.sentence, "line": self.line()}
        return {"step_ms": self.step_ms, "limit_ms": self.limit_ms, **parts, **own}

    def line(self) -> str:
        """Return the shares of a step in one line."""
        shares = {cause: 100 * ms / self.step_ms for cause, ms in {"work": self.limit_ms, **self.parts}.items()}
        return ", ".join(f"{cause} {share:.0f} %" for cause, share in shares.items() if share >= 0.5)


def attribute_lost_time(
    trace: Trace, shards: Sequence[Sequence[Sequence[int]]], cores: int | None = None, one_process: bool = False
) -> LostTime:
    """Attribute the time of a step of `trace`, which should have several steps.

    Args:
        shards: of each worker, (stage, route, number of layers, form) of its shards; stages of one form should take
            equally long.
        cores: cores of the machine, if all workers compute on the CPU of one machine.
        one_process: whether the workers are threads of one process, which take turns.
    """
    return _Case(trace, shards, cores, one_process).lost()


@dataclass
class _Case:
    trace: Trace
    shards: Sequence[Sequence[Sequence[int]]]
    cores: int | None
    one_process: bool

    def __post_init__(self) -> None:
        self._spec, self._actual = self.trace.spec, self.trace.cost()
        self._records = [self.trace.steps[step] for step in sorted(self.trace.steps)]
        #: by worker, the ratio of its times to those of other workers for stages of the same form
        self._slowness = self._compare()
        #: (source, target) -> median transfer time in ms
        self._delays = {pair: median(way.ms for way in found) for pair, found in transfers(self._records).items()}
        self._actions = [r.action for records in self._records[-1:] for record in records for r in record.actions]

    def lost(self) -> LostTime:
        spec = self._spec
        step = self.trace.step_ms
        nominal_work: dict[Kind, list[float]] = defaultdict(list)
        for action in self._actions:
            nominal_work[action.kind].append(self._nominal(action))
        mean = {kind: sum(costs) / len(costs) for kind, costs in nominal_work.items()}
        limit = sum(map(sum, nominal_work.values())) / spec.num_workers
        equal = self._simulate(lambda action: mean.get(action.kind, 0.0))
        uneven = self._simulate(self._nominal)
        slow = self._simulate(self._actual)
        linked = self._simulate(self._actual, self._excess())
        charged = {
            "bubble": equal - limit,
            "imbalance": uneven - equal,
            "slow worker": slow - uneven,
            "link": linked - slow,
            "data": max(self._data_waits(), default=0.0),
        }
        parts = {cause: max(0.0, ms) for cause, ms in charged.items()}
        # A simulation with medians may exceed the measured time; the parts are then scaled down alike.
        room = max(0.0, step - limit)
        scale = min(1.0, room / max(sum(parts.values()), 1e-9))
        parts = {cause: scale * ms for cause, ms in parts.items()}
        parts["overhead"] = max(0.0, room - sum(parts.values()))
        lost = LostTime(step, min(limit, step), parts, self._data_cause())
        return replace(lost, sentence=self._sentence(lost))

    # --- costs of actions

    def _nominal(self, action: Action) -> float:
        slowness = self._slowness[self._spec.worker(action)]
        return self._actual(action) / (slowness if slowness >= _SLOW else 1.0)

    def _simulate(self, cost: Cost, links: Mapping[tuple[int, int], Link] | None = None) -> float:
        return simulate(self._spec, cost, steps=_STEPS, links=links).step_time

    # --- links and data

    def _excess(self) -> dict[tuple[int, int], Link]:
        """Return the links' transfer times beyond the runtime's own part."""
        own = min(_RUNTIME_HOP_MS, min(self._delays.values(), default=0.0))
        return {pair: Link(delay - own) for pair, delay in self._delays.items() if delay > own}

    def _data_waits(self) -> list[float]:
        """Return, by worker, the median ms by which its calls were later than they could have been."""
        late: dict[int, list[float]] = defaultdict(list)
        for before, after in pairwise(self._records):
            ended = {record.worker: record.end_ns for record in before}
            made = {run.action: run.end_ns for record in after for run in record.actions}
            for record in after:
                ready = ended[record.worker]
                if record.actions:
                    needs = self._spec.data(record.actions[0].action)
                    # The time of production, not of arrival, since a late worker has not asked for the payloads.
                    ready = max([ready, *(made[need] for need in needs if need in made)])
                late[record.worker].append(max(0.0, (record.start_ns - ready) / 1e6))
        # Reading a batch while a step drains delays it, too.
        read = {w: median(r.data_wait_ns / 1e6 for rs in self._records for r in rs if r.worker == w) for w in late}
        return [max(median(late[w]), read[w]) for w in range(self._spec.num_workers) if w in late]

    def _data_cause(self) -> str:
        """Return the main cause of waiting for batches, if reading them explains the waits between steps."""
        waited: Counter[str] = Counter()
        for record in (record for records in self._records for record in records):
            waited[record.data_cause] += record.data_wait_ns
        ((worst, ns),) = waited.most_common(1)
        between = max(self._data_waits(), default=0.0) * len(self._records)
        return worst if ns / 1e6 > _KNOWN * between else ""

    # --- words

    def _sentence(self, lost: LostTime) -> str:
        parts = dict(lost.parts)
        own = parts.pop("bubble")
        worst = max(parts, key=lambda cause: parts[cause] * (_VAGUE if cause == "overhead" else 1))
        share = parts[worst] / lost.step_ms
        name = name_of(self._spec)
        if share < _NEGLIGIBLE:
            reached = 100 * (lost.limit_ms + own) / lost.step_ms
            advice = "; more microbatches make it smaller" if own > _NEGLIGIBLE * lost.step_ms else ""
            return (
                f"the run reaches {reached:.0f} % of what {name} allows; "
                f"its own bubble is {100 * own / lost.step_ms:.0f} %{advice}"
            )
        sentence = self._blame(worst, f"costs about {100 * share:.0f} % of a step", lost)
        if own > parts[worst]:
            sentence += f"; {name}'s own bubble is {100 * own / lost.step_ms:.0f} %, less with more microbatches"
        return sentence

    def _blame(self, worst: str, costs: str, lost: LostTime) -> str:
        if worst == "data":
            return self._late_data(costs, lost.data_cause)
        if worst == "overhead" and self.one_process:
            return (
                f"the workers are threads of one process and take turns, which {costs}: that is for looking and "
                "debugging; rpc-pipe run gives each a process"
            )
        busy = [0.0] * self._spec.num_workers
        for action in self._actions:
            busy[self._spec.worker(action)] += self._actual(action)
        usual = max(median_low(busy), 1e-9)
        uneven = worst == "imbalance" and max(busy) >= _BUSIER * usual
        if self.cores is not None and self.cores < len(busy) and not uneven:
            # Who waits for a core looks slow, and so does a link to it; which one it is changes from run to run.
            shared = f"{len(busy)} workers share {self.cores} cores of one machine"
            return f"the workers wait for a core, which {costs}: {shared}"
        if worst == "slow worker" or uneven:
            by = self._slowness if worst == "slow worker" else busy
            worker = max(range(len(busy)), key=by.__getitem__)
            times = busy[worker] / usual
            busier = f"is {times:.1f} x the median" if times >= _BUSIER else "is slow"  # it may have less to do
            return f"worker {worker} {busier} ({self._reason(worker, uneven)}), which {costs}"
        if worst == "imbalance" and len(self._spec.slice_sizes) > 1:
            return (
                f"some slices take longer than others, which {costs}: rpc-pipe plan --slices auto chooses their sizes"
            )
        if worst == "imbalance":
            return f"the workers compute equally long, but an action takes longer on one than on others, which {costs}"
        if worst == "link":
            return self._slow_link(costs)
        typical = median(self._actual(action) for action in self._actions if action.kind in (F, B))
        return (
            f"the runtime itself {costs}: forwards and backwards of {typical:.1f} ms are short, or vary "
            "as other programs take the cores; larger or fewer microbatches make them longer"
        )

    def _late_data(self, costs: str, cause: str) -> str:
        waits = self._data_waits()
        worker = max(range(len(waits)), key=waits.__getitem__)
        what, advice = _DATA[cause]
        return f"worker {worker} waits {waits[worker]:.1f} ms for data between steps ({what}), which {costs}; {advice}"

    def _reason(self, worker: int, uneven: bool) -> str:
        """Say why a worker takes longer."""
        if not uneven:
            times = f"{self._slowness[worker]:.1f} x as long there as elsewhere"
            return f"stages of the same form take {times}: a slow worker, unless they are heavier"
        counts = [sum(count for _, route, count, _ in shards if route == 0) for shards in self.shards]
        return f"its {counts[worker]} of {sum(counts)} layers take longer than others': rpc-pipe plan finds cuts"

    def _slow_link(self, costs: str) -> str:
        source, target = max(self._delays, key=lambda pair: self._delays[pair])
        slowest, typical = self._delays[source, target], median_low(self._delays.values())
        compared = f", {slowest / typical:.0f} x the median of all links" if slowest > 2 * typical > 0 else ""
        way = f"payloads take {slowest:.1f} ms from worker {source} to worker {target}{compared}"
        return f"{way}: a slow link, which {costs}; eager-1f1b or a wider window hides it for more activations"

    def _stage_ms(self, stage: int, route: int) -> float:
        """Return how long a worker computes for a microbatch of a stage."""
        first = next((m for m in range(self._spec.num_microbatches) if self._spec.route(m) == route), 0)
        return sum(self._actual(action) for action in self._spec.actions(stage, first))

    def _compare(self) -> list[float]:
        """Return, by worker, the ratio of its times to those of other workers, for forms of stages that both have.

        1 where that is not known.
        """
        times: dict[int, dict[int, float]] = defaultdict(dict)
        for worker, shards in enumerate(self.shards):
            for stage, route, _, form in shards:
                times[form][worker] = self._stage_ms(stage, route)
        ratios: dict[int, list[float]] = defaultdict(list)
        for by_worker in times.values():
            usual = median_low(by_worker.values()) if len(by_worker) > 1 else 0.0
            for worker, own in by_worker.items() if usual else ():
                ratios[worker].append(own / usual)
        return [max(1.0, median(ratios.get(worker, [1.0]))) for worker in range(self._spec.num_workers)]
