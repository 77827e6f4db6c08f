"""A comparison of all schedules for one model on the same workers, in time and memory. Loads without torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, TypeVar

from ..dependency import Action, B, ConfigError, F, I, Kind, Order, PipeError, R, Spec, W
from ..dependency.declared import REPLICAS
from ..dependency.earlier_steps import lateness
from ..model.sharding import cut
from ..system.sizes import format_bytes
from .footprint import Size, copy_time, peak_bytes, weight_bytes
from .plan import schedule_label
from .profile import SUMMED, TIMED, Chain, LayerCost
from .relation import Relation
from .search import VARIANTS
from .simulator import Cost, Simulation, simulate
from .slice_costs import SliceCosts
from .specs import make_spec
from .steady import Priced, check_some, price

Result = TypeVar("Result")

#: the function that a process of the pool calls
_work: Callable[[int], Any] | None = None


def in_parallel(
    work: Callable[[int], Result], count: int, tell: Callable[[float], None], *, cores: int | None = None
) -> list[Result]:
    """Return the results of `work` for each number below `count`; raise its errors.

    Args:
        work: may be a closure; its results are sent between processes.
        tell: function of the progress, 0 to 1; called after each result.
        cores: number of processes; 1: this one alone; None: one for each core that this process may use.
    """
    cores = min(count, len(os.sched_getaffinity(0)) if cores is None else cores)
    found: dict[int, Result] = {}
    if cores <= 1:
        for number in range(count):
            found[number] = work(number)
            tell(len(found) / count)
        return [*found.values()]
    global _work
    _work = work
    # The processes are forks, so closures need not be sent to them. The last calls, often the longest, begin first.
    with ProcessPoolExecutor(cores, get_context("fork")) as pool:
        calls = {pool.submit(_call, number): number for number in reversed(range(count))}
        for call in as_completed(calls):
            found[calls[call]] = call.result()
            tell(len(found) / count)
    return [found[number] for number in range(count)]


def _call(number: int) -> Any:
    assert _work is not None
    return _work(number)


#: number of steps that are simulated in sequence for the time of a step in a stream
_STEPS = 4
#: with this many forwards in a worker's share, several processes price the schedules
_MANY = 4096


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a microbatch on a stage, for any number of stages.

    They are given for a worker's share, 1/P of the model, which is divided evenly among its stages; or for every
    layer, and these are cut as `Pipeline` cuts them.
    """

    num_workers: int
    #: time by kind, of a worker's share or of each layer
    costs: Sequence[Mapping[Kind, float]]
    #: bytes, likewise; empty: memory is not computed
    sizes: Sequence[Size] = ()
    by_layer: bool = False
    #: bytes a unit of time that an action on `copy` moves
    copy: float = float("inf")

    def stages(self, num_stages: int) -> list[LayerCost]:
        """Return the costs of each stage; without given sizes, of 0 bytes."""
        sizes = self.sizes or [Size()] * len(self.costs)
        given = [LayerCost(complete_costs(costs), size) for costs, size in zip(self.costs, sizes, strict=True)]
        if self.by_layer:
            chain = Chain(given)
            return [
                LayerCost({kind: chain.time(kind, a, b) for kind in TIMED}, chain.size(a, b))
                for a, b in ((layers.start, layers.stop) for layers in cut(chain.num_blocks, num_stages, None))
            ]
        (share,), part = given, self.num_workers / num_stages
        times = {kind: time * part for kind, time in share.times.items()}
        size = replace(share.size, **{name: getattr(share.size, name) * part for name in SUMMED})
        return [LayerCost({kind: int(t) if t == int(t) else t for kind, t in times.items()}, size)] * num_stages


def complete_costs(costs: Mapping[Kind, float]) -> dict[Kind, float]:
    """Return costs with the missing kinds: B = I + W; I = W = B / 2 if only B is known; R = F."""
    full = dict(costs)
    if I in full or W in full:
        full.setdefault(B, full.get(I, 0) + full.get(W, 0))
    backward = full.get(B, 0)
    full.setdefault(I, backward - full[W] if W in full else backward / 2)
    full.setdefault(W, backward - full[I])
    full.setdefault(R, full.get(F, 0))
    return full


@dataclass(frozen=True)
class Row:
    """The costs of one schedule. Times in the unit of the given costs, memory in bytes."""

    schedule: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    order: Order = "ready"
    makespan: float = 0
    #: time of a step in a stream
    step_time: float = 0
    bubble: float = 0
    #: most activations of a worker, in microbatches of a worker's share of the model
    peak_activations: float = 0
    #: peak bytes of the worker that holds most; None: no sizes were given
    peak_memory: float | None = None
    #: peak bytes of each worker
    memory_by_worker: Sequence[float] = ()
    #: payloads between workers in a step
    messages: int = 0
    #: False: asynchronous, so the trained parameters differ
    synchronous: bool = True
    #: by worker: by how many updates gradients are late, and copies of weights in worker's shares
    staleness: Sequence[int] = ()
    weight_copies: Sequence[int] = ()
    #: bytes of these copies, by worker; None: no sizes were given
    weight_bytes: Sequence[float] | None = None
    #: why it cannot be used; then all else is empty
    refused: str = ""

    @property
    def overtakes(self) -> bool:
        """Whether forwards overtake updates."""
        return not self.synchronous

    @property
    def replicates(self) -> bool:
        """Whether a synchronous schedule holds more than one copy of the weights in each replica."""
        return not self.overtakes and max(self.weight_copies, default=1) > self.parameters.get("replicas", 1)

    @property
    def name(self) -> str:
        """The schedule with the parameters that are not its defaults, without replicas' ones."""
        return schedule_label(self.schedule, {key: v for key, v in self.parameters.items() if key not in REPLICAS})


def compare(
    model: ModelCosts,
    num_microbatches: int,
    *,
    limit: float | None = None,
    also: tuple[str, Mapping[str, Any]] | None = None,
    slices: str | None = None,
    attention: float = 0,
    unequal: Callable[[Spec], tuple[Sequence[float], Cost]] = lambda spec: ((), lambda action: 1),
    replicas: Mapping[str, Any] = {},
    members: int = 1,
    tell: Callable[[float], None] = lambda share: None,
    **run: Any,
) -> list[Row]:
    """Return a row for every schedule, the fastest first.

    Asynchronous schedules, which train other parameters, come behind the synchronous ones; schedules that cannot be
    used or exceed `limit` bytes come last.

    Args:
        also: another schedule, by name or file, and its parameters.
        slices: the slices of sequences, as for `make_spec`.
        attention: share of a whole sequence's time that is causal attention, 0 to 1.
        unequal: `by_microbatch` of their lengths, if microbatches have several.
        replicas: parameters of every schedule: how many replicas, and their options, as for `make_spec`.
        members: how many processes are one worker; the costs are theirs.
        tell: function of the progress, 0 to 1; called after each schedule.
        run: `comm` and `order`, as of `simulate`.
    """
    variants = [*VARIANTS, also] if also and also not in VARIANTS else VARIANTS

    def row(number: int) -> Row:
        name, own = variants[number]
        unpriced = Row(name, {**own, **replicas})
        try:
            spec = make_spec(name, model.num_workers, num_microbatches, unpriced.parameters, slices)
            lengths, by_microbatch = unequal(spec)
            stages = model.stages(spec.num_stages)
            check_some(spec)
            if members > 1 and not spec.synchronous:
                raise ConfigError("members meet in one update a step")
            cost = _cost(spec, stages, attention, by_microbatch, model.copy)
            found = _priced(unpriced, spec, lengths, [stage.size for stage in stages] if model.sizes else [], cost, run)
        except PipeError as error:
            return replace(unpriced, refused=str(error))
        needs = found.peak_memory
        return replace(found, refused=f"needs {format_bytes(needs)}" if limit and needs and needs > limit else "")

    many = model.num_workers * num_microbatches > _MANY
    rows = in_parallel(row, len(variants), tell, cores=None if many else 1)
    return sorted(rows, key=lambda row: (bool(row.refused), row.overtakes, row.makespan, row.peak_activations))


def _cost(spec: Spec, stages: Sequence[LayerCost], attention: float, by: Cost, copy: float) -> Cost:
    share = SliceCosts(attention=attention).time_share(spec)

    def cost(action: Action) -> float:
        took = stages[action.stage].times.get(action.kind)
        if took is None:
            took = copy_time(action.kind, stages[spec.moved(action)].size, copy)
        return took * share(action) * by(action)

    return cost


def _priced(row: Row, spec: Spec, lengths: Sequence[float], sizes: Sequence[Size], cost: Cost, run: Any) -> Row:
    """Return the row of a schedule with its costs; with memory if there are `sizes`."""
    (late, copies), memory = lateness(spec), tuple[float, ...]()
    further = price(spec, cost, steps=_STEPS, **run).step_time
    result: Priced | Simulation
    if sizes:
        result = simulate(Relation(spec, lengths=lengths), cost, **run)
        memory = peak_bytes(result, sizes)
    else:
        result = price(spec, cost, **run)
    return replace(
        row, order=result.order, makespan=result.makespan, step_time=further, bubble=result.bubble,
        peak_activations=max(result.peak_activations) * spec.num_workers / spec.num_stages,
        peak_memory=max(memory, default=None), memory_by_worker=memory, messages=result.messages,
        synchronous=spec.synchronous, staleness=late, weight_copies=copies,
        weight_bytes=weight_bytes(spec, sizes) if sizes else None,
    )  # fmt: skip


def verdict(rows: Sequence[Row], limit: float | None) -> str:
    """Return which schedule to use, in a sentence or two, and which were left out.

    Where the memory of weights is not given, none that holds several copies of them is recommended.
    """
    fit = [row for row in rows if not row.refused]
    overtaken = [row for row in fit if row.overtakes]
    whole = [row for row in fit if row.replicates and not any(row.weight_bytes or ())]
    usable = [row for row in fit if row not in (*overtaken, *whole)]
    lines = []
    if usable:
        best = min(usable, key=lambda row: (row.step_time, row.peak_activations))
        lines.append(f"fastest when steps follow each other: {best.name}, {best.step_time:.6g} a step")
        kept = [row for row in usable if row.step_time <= 1.1 * best.step_time]
        least = min(kept, key=lambda row: (max(row.weight_copies), row.peak_activations, row.step_time))
        if least is not best:
            lines.append(f"least memory within 10 % of that: {least.name}, {least.step_time:.6g} a step")
    elif limit is not None and not overtaken:
        lines.append(f"none fits into {format_bytes(limit)}")
    if whole:
        named = ", ".join(f"{row.name} ({max(row.weight_copies)} copies, {row.step_time:.6g} a step)" for row in whole)
        lines.append(f"* not compared, as the memory of their several copies of the weights is not given: {named}")
    if overtaken:
        named = ", ".join(
            f"{row.name} ({row.step_time:.6g} a step, "
            + (f"gradients up to {max(row.staleness)} late)" if max(row.staleness) else "no gradient late)")
            for row in sorted(overtaken, key=lambda row: row.step_time)
        )
        lines.append(f"asynchronous, so they train something else, and stand last: {named}")
    if left_out := [f"{row.name} ({row.refused})" for row in rows if row.refused]:
        lines.append(f"left out: {', '.join(left_out)}")
    return "\n".join(lines)


def describe_staleness(spec: Spec) -> list[str]:
    """Return a line on the staleness and weight copies of an asynchronous schedule; none of a synchronous one."""
    if spec.synchronous:
        return []
    late, copies = (", ".join(map(str, counts)) for counts in lateness(spec))
    return [f"asynchronous: gradients are up to {late} updates late by worker; copies of the weights {copies}"]
