"""A trace: consecutive steps of all workers as they ran, in one clock, with their spec. Loads without torch.

A watcher does not have the class of the user's schedule and must not run the user's script. Each worker writes its part
of the relation (`own_boards.list_program`); the parts of all workers are the whole relation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

from ..boards.view import RECENT, View, layout, step_ms
from ..dependency import Action, ConfigError, F, Kind, Spec, updates_a_step
from ..dependency.action import split_step
from ..dependency.declared import Parallelism
from ..drawing.chrome import write_chrome
from ..drawing.svg import Picture
from ..drawing.timeline import bubble, row_names
from ..planning.simulator import Cost, Simulation, simulate
from ..planning.span import Span, waits
from ..planning.unequal import by_microbatch
from ..schedules import name_of
from ..system.files import refused
from ..workers.hooks import StepRecord

#: most spans with computed causes of waits
_MOST_EXPLAINED = 6_000
#: least ratios of the longest to the shortest unequal microbatch: of times, and of bytes handed on
_LONGER, _LARGER = 1.3, 1.1


@dataclass(frozen=True)
class Trace:
    """Consecutive steps, each with the records of all workers in order of workers."""

    spec: Spec
    steps: Mapping[int, Sequence[StepRecord]]
    #: largest error of the alignment of clocks, in ms
    clock_error_ms: float = 0.0
    #: name of the run, such as its script's
    run: str = ""
    #: the names of the workers' rows, and where the model's parts are
    rows: Sequence[str] = ()
    layout: str = ""
    #: the numbers of the workers; empty: from 0
    numbers: Sequence[int] = ()

    def spans(self, last: int = 0) -> list[Span]:
        """Return the spans of a number of last steps, in ms; 0: of all steps."""
        return [span for step in sorted(self.steps)[-last:] for span in spans_of(self.steps[step])]

    @property
    def bubble(self) -> float:
        """Idle share of the workers' time over the recorded steps, as on the pages."""
        return bubble(self.spans(), self.spec.num_workers)

    @property
    def step_ms(self) -> float:
        """`step_ms` of these steps."""
        return step_ms([self.steps[step] for step in sorted(self.steps)])

    def cost(self) -> Cost:
        """Return the median ms of actions by worker, stage, kind and slice, as a cost for the simulator."""
        times: dict[tuple[int, int, Kind, float], list[float]] = defaultdict(list)

        def key(worker: int, action: Action) -> tuple[int, int, Kind, float]:
            return worker, action.stage, action.kind, self.spec.extent(action)[0]

        for worker, action, start, end in self.spans():
            times[key(worker, action)].append(end - start)
        medians = {at: median(values) for at, values in times.items()}
        return lambda action: medians.get(key(self.spec.worker(action), action), 0.0)

    def lengths(self, last: int = 1) -> list[list[float]]:
        """Return the times of microbatches in the last steps, relative to the usual one; []: all are equal.

        Times alone differ by noise: the payloads of unequal microbatches differ, too, or the run has put them in order.
        """
        usual, spec, found = self.cost(), self.spec, list[list[float]]()
        count, differ = spec.num_whole, True
        for records in (self.steps[step] for step in sorted(self.steps)[-last:]):
            ratios: dict[int, list[float]] = defaultdict(list)
            sent: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
            for record in records:
                for action, start_ns, end_ns in record.actions:
                    if action.kind.per_microbatch and (ms := usual(action)):
                        ratios[spec.whole_microbatch(action)].append((end_ns - start_ns) / 1e6 / ms)
                for action, _, num_bytes, _ in (arrived for arrived in record.arrivals if arrived.action.kind is F):
                    sent[record.worker, action.stage][spec.whole_microbatch(action)] += num_bytes
            bytes_differ = not sent or any(max(each.values()) > _LARGER * min(each.values()) for each in sent.values())
            differ &= bytes_differ or any(record.microbatch_order for record in records)
            found.append([median(ratios.get(m, [1.0])) for m in range(count)])
        return found if differ and median(max(each) / max(min(each), 1e-9) for each in found) > _LONGER else []

    def simulated(self, steps: int = 1) -> Simulation:
        """Simulate the schedule with the measured costs, the last step's unequal microbatches, and free transfers."""
        cost = self.cost()
        for lengths in self.lengths():
            cost = by_length(self.spec, cost, lengths)
        return simulate(self.spec, cost, steps=steps)

    def write_chrome(self, path: str | Path, device: str = "cpu") -> None:
        """Write Chrome's trace event format, which Perfetto reads.

        Raises:
            ConfigError: the file cannot be written.
        """
        steps = {step: spans_of(records) for step, records in self.steps.items()}
        with refused(ConfigError, f"{path}: cannot be written"):
            write_chrome(path, self.spec, steps, device=device, clock_error_ms=self.clock_error_ms)

    def pictures(self) -> tuple[Picture, Picture]:
        """Return these steps as planned and as they ran, in milliseconds."""
        spec, last = self.spec, max(self.steps)
        schedule = f"{name_of(spec)}, {spec.counted}"
        planned, actual = self.simulated(len(self.steps)).spans, self.spans()
        why_planned, why_actual = (
            waits(spec, spans, slack=slack) if len(spans) <= _MOST_EXPLAINED else {}
            for spans, slack in ((planned, 0.0), (actual, self.clock_error_ms))
        )
        measured = any(record.peak_bytes for record in self.steps[last])
        memory = [f"{record.peak_bytes / 1e6:,.0f} MB" for record in self.steps[last]] if measured else []
        ran = f"actual: step {last} of {self.run or 'the run'}, {schedule}"
        name, notes = f"this schedule with the measured times: {schedule}", [self.layout] if self.layout else []
        made = Picture(name, planned, spec.num_workers, "ms", "idle", why_planned, spec, rows=self.rows)
        return made, replace(made, name=ran, spans=actual, waits=why_actual, notes=notes, memory=memory)


def by_length(spec: Spec, usual: Cost, lengths: Sequence[float]) -> Cost:
    """Return the costs of actions, given the usual ones and each microbatch's time relative to the usual one."""

    _, factor = by_microbatch(spec, lengths=lengths, order="given")
    return lambda action: usual(action) * factor(action)


def spans_of(records: Sequence[StepRecord]) -> list[Span]:
    """Return the actions in `records`, in ms, without transfers between workers."""
    ran = [(r.worker, run) for r in records for run in r.actions if run.action.kind.resource != "control"]
    return [Span(worker, action, start / 1e6, end / 1e6) for worker, (action, start, end) in ran]


class Transfer(NamedTuple):
    """A transfer of a payload from one worker to another."""

    #: time from its production, or from the start of the receiver's step if that is later, to its arrival
    ms: float
    num_bytes: int


def transfers(steps: Iterable[Sequence[StepRecord]]) -> dict[tuple[int, int], list[Transfer]]:
    """Return the transfers of payloads in `steps`, by (source, target)."""
    found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for records in steps:
        ends = {(r.worker, a.action): a.end_ns for r in records for a in r.actions}
        for record in records:
            for arrived in record.arrivals:
                made = ends.get((arrived.peer, arrived.action))
                if made is not None and arrived.action.kind.resource != "control":
                    ns = arrived.at_ns - max(made, record.start_ns)
                    found[arrived.peer, record.worker].append(Transfer(max(0, ns) / 1e6, arrived.num_bytes))
    return found


def recent_trace(view: View, count: int = RECENT) -> Trace | None:
    """Return the last `count` complete consecutive steps with equal numbers of microbatches; 0: all that there are.

    None if there is none, or the schedule is unknown. A batch of few rows has fewer microbatches; steps of the most
    common number are returned.
    """
    if not (sizes := {step: view.records(step)[0].num_microbatches for step in view.complete_steps(0)}):
        return None
    usual = Counter(list(sizes.values())[-max(count, RECENT) :]).most_common(1)[0][0]
    alike = [step for step, size in sizes.items() if size == usual]
    runs = [[step for _, step in run] for _, run in groupby(enumerate(alike), lambda at: at[1] - at[0])]
    return trace_of(view, runs[-1][-count:])


def trace_of(view: View, steps: Sequence[int]) -> Trace | None:
    """Return these complete steps; None if some worker has listed fewer microbatches than they have."""
    count = max(view.records(step)[0].num_microbatches for step in steps)
    there = view.latest.listings
    listed = {header["worker"]: there[rank] for rank, header in view.headers.items() if rank in there}
    listings = [listing for _, listing in sorted(listed.items())]
    most = min((listing["microbatches"] for listing in listings), default=0)
    if len(listings) < view.num_workers or most < count:
        return None
    if (count, most) not in view.derived:
        view.derived[count, most] = spec_of_listings(listings, count)
    run, error, ran = view.header.get("script", ""), view.latest.clock_error_ms, {s: view.records(s) for s in steps}
    return Trace(view.derived[count, most], ran, error, run, _rows(view.headers), layout(view.headers), view.numbers)


def _rows(headers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the names of the rows of a timeline, in order of workers; none without a layout."""
    by_worker = {header["worker"]: header for header in headers.values()}
    first = next(iter(by_worker.values()), {})
    if "replicas" not in first or len(by_worker) < first["num_workers"]:
        return []
    own = [(each.get("rank", w) // each.get("members", 1), each["shards"]) for w, each in sorted(by_worker.items())]
    hosted = {worker: [(stage, route) for stage, route, *_ in shards] for worker, shards in own}
    return row_names(hosted, first["num_routes"], first["replicas"])


def spec_of_listings(listings: Sequence[Mapping[str, Any]], num_microbatches: int | None = None) -> Spec:
    """Return the spec of the listings of all workers, in order of workers.

    Args:
        num_microbatches: of a smaller batch; later microbatches are left out.
    """
    first = listings[0]
    count: int = num_microbatches or first["microbatches"]
    hosts = {(stage, route): worker for worker, own in enumerate(listings) for stage, route in own["shards"]}
    stream = {name: first[name] for name in ("period", "update_every") if name in first}
    own = _nodes(listings, count) | stream | {
        "hosts": hosts,
        "num_stages": 1 + max(stage for stage, _ in hosts),
        "num_routes": 1 + max(route for _, route in hosts),
        "routes": first["routes"],
        "order": first["order"],
        "synchronous": not stream,
        "parallelism": Parallelism(replicas=first["replicas"], slices=tuple(first["slices"])),
    }  # fmt: skip
    cls: type[ListedRelation] = type(first["schedule"], (ListedRelation,), own)
    return cls(num_workers=len(listings), num_microbatches=count)


def _nodes(listings: Sequence[Mapping[str, Any]], num_microbatches: int) -> dict[str, Any]:
    """Return the actions of a step with their needs, slots and workers."""
    needs, slots, at = dict[Action, list[tuple[int, Action]]](), dict[Action, int](), dict[Action, int]()
    for worker, listing in enumerate(listings):
        earlier = listing.get("earlier") or [()] * len(listing["program"])
        numbered = listing.get("slots") or range(len(earlier))
        for slot, (name, *own), before in zip(numbered, listing["program"], earlier, strict=True):
            at[action := Action.parse(name)] = worker
            if action.index < num_microbatches:
                slots[action] = slot
                parsed = [(back, Action.parse(need)) for back, need in [*((0, need) for need in own), *before]]
                needs[action] = [(back, need) for back, need in parsed if need.index < num_microbatches]
    handovers = tuple(tuple(map(Action.parse, each)) for each in listings[0].get("handovers", ()))
    done: dict[tuple[int, int], tuple[Action, ...]] = defaultdict(tuple)
    for action in sorted((a for a in slots if a.kind.per_microbatch), key=slots.__getitem__):
        done[action.stage, action.index] += (action,)
    at |= {hand: at[last] for last, hand, _ in handovers}
    return {"needs_of": needs, "slots": slots, "at": at, "done": done, "handovers": handovers}


class ListedRelation(Spec):
    """A schedule with a relation that is listed action by action."""

    #: (number of steps before, action)
    needs_of: ClassVar[Mapping[Action, Sequence[tuple[int, Action]]]]
    slots: ClassVar[Mapping[Action, int]]
    #: the actions by (stage, microbatch of a step), in order
    done: ClassVar[Mapping[tuple[int, int], tuple[Action, ...]]]
    #: worker by (stage, route)
    hosts: ClassVar[Mapping[tuple[int, int], int]]
    #: worker by action: several may share the microbatches of one that has died
    at: ClassVar[Mapping[Action, int]]
    #: by microbatch, if there are several
    routes: ClassVar[Sequence[int]]
    #: of a stream of overlapping steps: growth of slots from step to step
    period: ClassVar[int] = 0

    def place(self, stage: int, route: int) -> int:
        return self.hosts[stage, route]

    def worker(self, action: Action) -> int:
        found = self.at.get(self._within(action)[1])
        return super().worker(action) if found is None else found

    def own_actions(self, worker: int) -> Iterator[Action]:
        if self.period:
            return super().own_actions(worker)
        return (action for action in self.slots if self.at[action] == worker)

    def route(self, microbatch: int) -> int:
        return self.routes[split_step(microbatch, self.num_microbatches)[1]] if self.routes else 0

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        step, m = split_step(microbatch, self.num_microbatches)
        return tuple([self._of(step, action) for action in self.done[stage, m]]) if step else self.done[stage, m]

    def after(self, action: Action) -> Iterable[Action]:
        step, own = self._within(action)
        found = self.needs_of.get(own, ())
        return [self._of(step - back, need) for back, need in found if self.orders(need) and step >= back]

    def slot(self, action: Action) -> int:
        step, own = self._within(action)
        return self.slots[own] + step * self.period

    def version(self, stage: int, microbatch: int) -> int:
        return 0  # it is in the listed needs

    def _within(self, action: Action) -> tuple[int, Action]:
        """Return the step of an action of a stream, and the action within that step."""
        step, index = split_step(action.index, self._per_step(action))
        return step, action._replace(index=index)

    def _of(self, step: int, action: Action) -> Action:
        return action._replace(index=action.index + step * self._per_step(action))

    def _per_step(self, action: Action) -> int:
        return self.num_microbatches if action.kind.per_microbatch else updates_a_step(self)
