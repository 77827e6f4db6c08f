"""A model profiled by all workers of a job at once: all are busy together, as in a pipeline."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...boards import run_folders
from ...dependency import B, F, G, I, Kind, R, U, W
from ...launching.job import current_job
from ...model.user_model import UserModel
from ...pipeline import Pipeline, Training
from ...workers.actor import WorkerActor
from ...workers.compute.devices.backends import backend_for
from ...workers.hooks import Listener, StepRecord
from ...workers.transport.call import Call
from ...workers.transport.payload import Payload, pack, unpack
from ..profile import LayerCost, Profile, as_json, from_json
from ..simulator import Link
from .block_timing import costs_of, layer_blocks, time_blocks
from .profiling import RUNTIME_MS, profile_model

#: seconds that a layer sleeps: long against the time that a thread needs to wake up
_SLEEP_S = 0.002
_STEPS, _MICROBATCHES = 6, 8
#: schedules that together have all kinds of actions; the runtime's time is measured for every kind that computes
_SCHEDULES = ("1f1b", "gpipe", "zb-h1", "chimera")
_MEASURED = (F, B, I, W, G, U)
#: payloads: small and large, bytes; how often each goes to and fro
_SMALL, _LARGE, _ROUNDS = 4_096, 4_194_304, 15
#: up to this number of workers every pair is measured; with more, neighbours only
_ALL_PAIRS = 8
#: payloads that move at once, bytes and count: the size of gradients, and of activations
_GRADIENTS, _HANDED_ON = (8_388_608, 1), (1_048_576, 8)
#: how often they move; products that are computed without them, and their rows
_MOVES, _PRODUCTS, _ROWS = 5, 50, 192


class Calibration(NamedTuple):
    """The result of a calibration, in milliseconds; of links, bytes a millisecond."""

    #: of an action besides computing
    per_action: dict[Kind, float]
    #: of a step besides its actions
    per_step: float
    #: by (from, to)
    links: dict[tuple[int, int], Link]
    #: compute time that a worker loses to a byte of gradients that goes out while one comes in
    per_byte: float
    #: and to a MiB of activations, that goes out or comes in
    per_mib: float


def calibrate(num_workers: int) -> tuple[WorkerActor, Calibration]:
    """Measure with all workers of this job, which make the same call; return this process's worker, for later use."""
    runtime, between = defaultdict[Kind, list[float]](list), list[float]()
    for schedule in _SCHEDULES:
        actor = _sleeping(num_workers, schedule, runtime, between)
    ways = _ping(actor)
    lost = _lost(actor, *_GRADIENTS), _lost(actor, *_HANDED_ON)  # `_ping` has made channels
    own = {kind.letter: median(took) for kind, took in runtime.items()}, median(between), ways, *lost
    told: list[Any] = actor.exchange("calibration", own)
    kinds = {kind: [each[0][kind.letter] for each in told if kind.letter in each[0]] for kind in _MEASURED}
    per_action = {kind: max(0.0, median(found)) for kind, found in kinds.items() if found}
    per_action[R] = per_action.get(F, 0.0)
    links = {tuple(pair): Link(*link) for each in told for pair, link in each[2]}
    per_byte, per_mib = (median(each[at] for each in told) for at in (3, 4))
    return actor, Calibration(per_action, told[0][1], links, per_byte, per_mib * 2**20 / 2)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(_SLEEP_S)
        return grad, None


class _Sleeping(nn.Module):
    """A layer that sleeps: once in its forward, once in each part of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, _SLEEP_S) + _Sleep.apply(self.weight, 0.0)  # type: ignore[no-untyped-call]
        return out


class _Records(Listener):
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step_finished(self, record: StepRecord) -> None:
        self.steps.append(record)


def _sleeping(
    num_workers: int, schedule: str, runtime: Mapping[Kind, list[float]], between: list[float]
) -> WorkerActor:
    """Train layers that sleep; return the worker, and add the extra times of each kind, and the times between steps."""
    optimizer = partial(torch.optim.SGD, lr=0.0)
    pipe = Pipeline(
        [_Sleeping] * num_workers, nn.functional.mse_loss, training=Training(optimizer), schedule=schedule, seed=0,
        num_microbatches=_MICROBATCHES, num_workers=num_workers,
    )  # fmt: skip
    actor = pipe.actors[0]
    records = _Records()
    pipe.listen(lambda worker: records)
    x = torch.ones(_MICROBATCHES, 8, requires_grad=True)
    for _ in range(_STEPS):
        pipe.step((x, x.detach()))
    (block,) = layer_blocks([_Sleeping()], x[:1].detach().requires_grad_())
    block.run()
    time_blocks([block], _STEPS)
    alone = costs_of([block], optimizer, _STEPS)[0].times
    pulled = {entry.action: [need.action for need in entry.pulled] for entry in pipe.program(actor.worker, len(x))}
    for record in records.steps[1:]:
        arrived = {arrival.action: arrival.at_ns for arrival in record.arrivals}
        ran = sorted((a for a in record.actions if a.action.kind in _MEASURED), key=lambda a: a.start_ns)
        near = [(a.end_ns, b) for a, b in pairwise(ran)]
        free = [pair for pair in near if all(arrived.get(need, 0) <= pair[0] for need in pulled[pair[1].action])]
        gaps = [after.start_ns - end for end, after in free]
        gap = median(gaps) / 1e6 if gaps else 0.0
        for action, start_ns, end_ns in ran:
            runtime[action.kind].append((end_ns - start_ns) / 1e6 - alone[action.kind] + gap)
    between += _between(records.steps[1:])
    return actor


def _between(records: Sequence[StepRecord]) -> Iterator[float]:
    """Yield the milliseconds from the end of a worker's last action to the start of its first of the next step."""
    computing = [[a for a in record.actions if a.action.kind.resource == "compute"] for record in records]
    for before, after in pairwise(computing):
        yield (min(a.start_ns for a in after) - max(a.end_ns for a in before)) / 1e6


def _ping(actor: WorkerActor) -> list[tuple[tuple[int, int], tuple[float, float]]]:
    """Return the links from and to this worker, for the pairs that have it first."""
    num_workers, me, found = len(actor.carrier.workers), actor.worker, []
    near = range(1, num_workers) if num_workers <= _ALL_PAIRS else (1, num_workers - 1)
    for a, b in (pair for pair in combinations(range(num_workers), 2) if pair[1] - pair[0] in near):
        call = Call(me, f"links of workers {a} and {b}")
        run = actor.mailbox.begin(call)
        if me in (a, b):
            other, first = (b, True) if me == a else (a, False)
            small, large = (_to_and_fro(actor, run, other, size, first) for size in (_SMALL, _LARGE))
            if first:
                latency = max(0.001, small / 2)
                link = latency, _LARGE / max(1e-3, large / 2 - latency)
                found += [((a, b), link), ((b, a), link)]
        actor.carrier.end(run)
    return found


def _to_and_fro(actor: WorkerActor, run: int, other: int, size: int, first: bool) -> float:
    """Return the milliseconds of a payload to the other worker and back, from the least disturbed ones."""
    here, there = (f"{size} to", f"{size} fro") if first else (f"{size} fro", f"{size} to")
    payload = pack(torch.zeros(size // 4))
    mailbox, took = actor.mailbox, []
    mailbox.pull(run, other, [f"{there} {number}" for number in range(_ROUNDS)])
    for number in range(_ROUNDS):
        begin = time.perf_counter()
        if first:
            mailbox.publish(run, f"{here} {number}", payload, [other])
        for arrival in mailbox.next_arrivals((run,), lambda: f"a payload of worker {other}"):
            assert isinstance(arrival.answer, Payload)
            unpack(arrival.answer)
        if not first:
            mailbox.publish(run, f"{here} {number}", payload, [other])
        took.append(time.perf_counter() - begin)
    return 1e3 * sorted(took[3:])[_ROUNDS // 5]


def _lost(actor: WorkerActor, size: int, count: int) -> float:
    """Return the milliseconds that computing loses to a byte sent to the next worker while one arrives.

    A payload in a channel is copied by the threads that compute. A payload too large for one is copied by threads of
    the transport: beside computing where cores are to spare, else instead of it. Only the processors' time for the copy
    counts, because other programs may use the processors too.

    Args:
        size: bytes of a payload; several payloads move at once.
    """
    me, num_workers = actor.worker, len(actor.carrier.workers)
    if num_workers == 1:
        return 0.0
    before, after = (me - 1) % num_workers, (me + 1) % num_workers
    payload, lost = pack(torch.zeros(size // 4)), []
    for _ in range(_MOVES):
        actor.exchange("all compute", None)
        run = actor.mailbox.begin(Call(me, "payloads move"))
        alone = _Computing()
        for _ in range(_PRODUCTS):
            alone.go_on(actor, run)
        usual = alone.took()
        actor.mailbox.pull(run, before, [f"{before} {number}" for number in range(count)])
        moving, left = _Computing(), count
        for number in range(count):
            actor.mailbox.publish(run, f"{me} {number}", payload, [after])
        while left:
            left -= moving.go_on(actor, run)
        actor.carrier.end(run)
        took = moving.took()
        lost.append(max(0.0, min(took[clock] - moving.done * usual[clock] / alone.done for clock in (0, 1))))
    return median(lost) / (size * count)


class _Computing:
    """Multiplies matrices, and polls for arrivals between products, as a worker does between actions."""

    def __init__(self) -> None:
        self._matrix = torch.ones(_ROWS, _ROWS)
        self._begin = time.perf_counter(), time.process_time()
        self.done = 0

    def go_on(self, actor: WorkerActor, run: int) -> int:
        """Compute a product; return how many payloads have arrived."""
        self._matrix @ self._matrix
        self.done += 1
        return len(actor.mailbox.arrivals((run,)))

    def took(self) -> tuple[float, float]:
        """Return the milliseconds of the clock, and of processors."""
        return 1e3 * (time.perf_counter() - self._begin[0]), 1e3 * (time.process_time() - self._begin[1])


#: smaller factors between the times of workers are noise: the workers count as equally fast
_NOISE = 1.1
#: a worker counts as slower only if at most one in this many blocks is not slower
_SLOW_SHARE = 5
#: smaller factors between the times of links are noise: the links count as equal
_SAME_LINK = 1.5
#: bytes of the payload that compares links by its time
_PAYLOAD_BYTES = 1e5


def profile_together(
    user_model: UserModel, rows: Sequence[int], num_workers: int, settings: Mapping[str, Any]
) -> tuple[Profile, int]:
    """Return the measurements of all workers of this job, and this worker's number; all make the same call.

    Args:
        user_model: the same on all workers.
        settings: keyword arguments of `profile_model`.

    Raises:
        ConfigError: as of `profile_model`.
    """
    os.environ[run_folders.FOLDER] = run_folders.OFF  # layers that sleep need no display
    actor, found = calibrate(num_workers)
    actor.exchange("all are there", None)
    job = current_job()
    backend_for(settings.get("device", "cpu"), job.place if job else actor.worker).use()  # `cuda`: another GPU for each

    def barrier() -> None:
        actor.exchange("updates are measured", None)

    own = profile_model(user_model, rows, at_least=num_workers, barrier=barrier, **settings)
    told = actor.exchange("profiles", json.dumps(as_json(own)))
    profiles = [from_json(json.loads(each), "the profile of a worker") for each in told]
    profile = merged(profiles, found.links)
    on_host = own.device == "cpu"  # a GPU runs behind its worker, which hides the worker's time
    profile = with_moves(profile, found.per_byte if on_host else 0.0)
    per_stage = around(profile.per_stage, found.per_action if on_host else {})
    per_step, per_mib = (max(0.0, found.per_step), found.per_mib) if on_host else (0.0, 0.0)
    return replace(profile, per_stage=per_stage, per_step=per_step, per_mib=per_mib), actor.worker


def with_moves(profile: Profile, per_byte: float) -> Profile:
    """Return a profile with the compute time that replicas lose while gradients move."""

    def moved(cost: LayerCost) -> LayerCost:
        return replace(cost, times={**cost.times, G: cost.times[G] + per_byte * cost.size.gradients})

    return replace(profile, measured={rows: [*map(moved, costs)] for rows, costs in profile.measured.items()})


def around(assumed: Mapping[Kind, float], found: Mapping[Kind, float]) -> dict[Kind, float]:
    """Return the time of each stage besides its blocks, ms, with the runtime's measured time for the assumed one."""
    # Not below 0: the assumed time has been divided by the speed of a worker that was slow meanwhile.
    return {**assumed, **{kind: max(0.0, assumed.get(kind, RUNTIME_MS) - RUNTIME_MS + found[kind]) for kind in found}}


def merged(profiles: Sequence[Profile], links: Mapping[tuple[int, int], Link]) -> Profile:
    """Return the median costs, scaled to the fastest worker, with the speeds of workers and their links.

    Args:
        profiles: by worker, of the same blocks.
        links: by (source, target).
    """
    slow = _slowness(profiles)
    first = profiles[0]

    def middle(times: Sequence[Mapping[Kind, float]]) -> dict[Kind, float]:
        return {kind: median(each[kind] / s for each, s in zip(times, slow, strict=True)) for kind in times[0]}

    by_rows = {rows: zip(*(profile.measured[rows] for profile in profiles), strict=True) for rows in first.measured}
    measured = {
        rows: [replace(costs[0], times=middle([cost.times for cost in costs])) for costs in blocks]
        for rows, blocks in by_rows.items()
    }
    topology = {"workers": [{"speed": round(1 / s, 3)} for s in slow], **_links_as_json(links)}
    per_stage, scatter = middle([p.per_stage for p in profiles]), median(p.scatter for p in profiles)
    about: Any = {"workers": len(profiles), "topology": topology, "scatter": scatter}
    return replace(first, measured=measured, per_stage=per_stage, **about)


def _slowness(profiles: Sequence[Profile]) -> list[float]:
    """Return the ratios of the workers' times to the fastest worker's; 1 for all if the differences are noise.

    A slower worker is slower at nearly every block; one that was disturbed is slower at some of them.
    """
    every = ([cost for costs in profile.measured.values() for cost in costs] for profile in profiles)
    blocks = [[cost.times[F] + cost.times[B] for cost in costs] for costs in every]
    totals = [sum(took) for took in blocks]
    fastest, slowest = blocks[totals.index(min(totals))], blocks[totals.index(max(totals))]
    ratios = sorted(b / a for a, b in zip(fastest, slowest, strict=True) if a)
    if not ratios or sum(slowest) < _NOISE * sum(fastest) or ratios[len(ratios) // _SLOW_SHARE] < _NOISE:
        return [1.0] * len(totals)
    return [total / sum(fastest) for total in totals]


def _links_as_json(links: Mapping[tuple[int, int], Link]) -> dict[str, Any]:
    """Return links as in a file for --topology: the median link, and each link that differs from it."""
    if not links:
        return {}
    usual = Link(median(x.latency for x in links.values()), median(x.bandwidth for x in links.values()))

    def takes(link: Link) -> float:
        return link.latency + _PAYLOAD_BYTES / link.bandwidth

    differ = {
        ends: link for ends, link in links.items() if not 1 / _SAME_LINK <= takes(link) / takes(usual) <= _SAME_LINK
    }
    others = {f"{a}-{b}": _link_as_json(link) for (a, b), link in differ.items()}
    return {"link": _link_as_json(usual), **({"links": others} if others else {})}


def _link_as_json(link: Link) -> dict[str, Any]:
    return {"latency_ms": round(link.latency, 4), "bandwidth": f"{round(link.bandwidth / 1e3, 3):.12g}MB"}
