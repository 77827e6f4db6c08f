"""What is measured: for each scenario the jobs of all systems, and the limit of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch import nn

from rpc_pipe.dependency import Action, B, F, I, R, Spec, W
from rpc_pipe.planning.simulator import Link, simulate
from rpc_pipe.planning.specs import make_spec

from .devices import WIDTH, Device, Times, batch
from .models import Model, balanced, bert, ragged, ragged_by_length, ragged_packed, resnet, stage_cost
from .planned import best_plan, options_of
from .systems import BARE, Job, Workload, absent

#: the peers' schedules by our names
PLANS = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "FillDrain": "gpipe",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "zb-h1",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}

#: every payload by one carrier, as between hosts
BY_CARRIER = [("rpc-pipe by RPC", "1f1b"), ("rpc-pipe by ZeroMQ", "1f1b")]

Cost = Callable[[Action], float]


@dataclass(frozen=True)
class Contest:
    """Jobs that are run in turn, and compared."""

    scenario: str
    jobs: list[Job]
    #: what an action of a job costs, ms
    cost: Callable[[Job], Cost]
    #: one-way travel time between two hosts that share the workers, ms
    travel_ms: float = 0
    #: other options of the program that emulates hosts, such as congestion and rate
    network: Mapping[str, str] = field(default_factory=dict)
    #: rows (lines, images) of a batch
    rows: int = 0

    def turns(self, rounds: int) -> list[Job]:
        """Return the jobs of the systems that are present, A B C A B C."""
        return [job for job in self.jobs if absent(job.system) is None] * rounds


def spec_of(schedule: str, workers: int, microbatches: int, options: Mapping[str, Any]) -> Spec:
    """Return the spec of a schedule of ours or a peer's."""
    return make_spec(PLANS.get(schedule, schedule), workers, microbatches, options)


def limit_ms(job: Job, cost: Cost) -> tuple[float, float]:
    """Return (time of a step in a run of steps with free communication, peak activations in shares of the model)."""
    spec = spec_of(job.schedule, job.workers, job.microbatches, job.options)
    alone = simulate(spec, cost)
    share = spec.num_workers / spec.num_stages
    return min(alone.makespan, simulate(spec, cost, steps=4).step_time), share * max(alone.peak_activations)


def predicted_ms(job: Job, cost: Cost, travel_ms: float) -> float:
    """Return what the simulator predicts for a step on two hosts, each with half of the workers."""
    spec, half = spec_of(job.schedule, job.workers, job.microbatches, job.options), job.workers // 2
    pairs = [(a, b) for a in range(job.workers) for b in range(job.workers) if (a < half) != (b < half)]
    return simulate(spec, cost, links=dict.fromkeys(pairs, Link(travel_ms))).makespan


def make_job(
    system: str, schedule: str, workers: int, microbatches: int, workload: Workload, steps: int, **options: Any
) -> Job:
    """Make a job of a system and its schedule."""
    stages = spec_of(schedule, workers, microbatches, options).num_stages
    return Job(system, schedule, workers, microbatches, workload, 2, steps, stages, options)


# --- emulated devices


def emulated(
    workers: int,
    microbatches: int,
    t: Mapping[str, float],
    steps: int,
    schedules: list[tuple[str, str]],
    *,
    jitter: float = 0,
    slow: float = 1,
    scenario: str,
    width: int = WIDTH,
    travel_ms: float = 0,
    **network: str,
) -> Contest:
    """Devices with times `t` in ms for a worker's whole share: F and B, or F, I and W where B is split.

    Args:
        slow: the worker in the middle takes so many times as long.
        network: other options of the program that emulates hosts.
    """
    times = partial(_times, workers, microbatches, jitter=jitter, slow=slow)

    def stage(index: int, count: int) -> nn.Module:
        kinds = "FIW" if "I" in t else "FB"
        return Device(*(times(t[kind], kind, index, count) for kind in kinds), width=width)

    drawn_once = cache(partial(batch, microbatches, width))
    workload = Workload(stage, nn.functional.mse_loss, lambda _: drawn_once())

    def cost(job: Job) -> Cost:
        count = job.num_stages
        split = "I" in t
        table = {kind: t.get(kind.letter, 0.0) for kind in (F, B, I, W)}
        if split:
            table[B] = t["I"] + t["W"]
        drawn = {(kind, s): times(table[kind], kind.letter, s, count) for kind in (F, B, I, W) for s in range(count)}
        return lambda a: 1e3 * drawn[F if a.kind is R else a.kind, a.stage].of[a.microbatch] if a.kind in _TIMED else 0

    jobs = [make_job(system, schedule, workers, microbatches, workload, steps) for system, schedule in schedules]
    return Contest(scenario, jobs, cost, travel_ms=travel_ms, network=network)


_TIMED = (F, B, I, W, R)


def _times(
    workers: int, microbatches: int, ms: float, kind: str, stage: int, count: int, *, jitter: float, slow: float
) -> Times:
    share = workers / count
    worker = stage if stage < workers else 2 * workers - 1 - stage  # of V shapes; round-robin is not slowed
    seconds = ms / 1e3 * share * (slow if worker == workers // 2 else 1)
    return Times(seconds, microbatches, jitter, (kind, stage))


def on_devices(quick: bool) -> Iterator[Contest]:
    """Same schedule, and each system's others, on even devices."""
    for workers in (4, 8):
        for t_f in (10, 2):
            schedules = [("rpc-pipe", "1f1b"), ("torch", "1F1B"), ("pippy", "1F1B"), *BY_CARRIER]
            if not quick:
                schedules += [("rpc-pipe", "eager-1f1b"), ("rpc-pipe", "interleaved"), ("torch", "Interleaved1F1B")]
                schedules += [("rpc-pipe", "gpipe"), ("torch", "GPipe"), ("pippy", "FillDrain")]
            name = f"emulated {t_f}/{2 * t_f} ms"
            yield emulated(workers, 2 * workers, {"F": t_f, "B": 2 * t_f}, 8, schedules, scenario=name)


def with_jitter(quick: bool) -> Iterator[Contest]:
    """Every action takes up to twice as long, at random."""
    schedules = [("rpc-pipe", "1f1b"), ("rpc-pipe", "eager-1f1b"), ("torch", "1F1B"), ("pippy", "1F1B")]
    for workers in (4,) if quick else (4, 8):
        t = {"F": 10.0, "B": 20.0}
        yield emulated(workers, 2 * workers, t, 6, schedules, jitter=1, scenario="jitter 10/20 ms x (1 + U(0,1))")


def with_slow_worker(quick: bool) -> Iterator[Contest]:
    """One worker takes 1.5 times as long."""
    schedules = [("rpc-pipe", "1f1b"), ("rpc-pipe", "eager-1f1b"), ("torch", "1F1B"), ("pippy", "1F1B")]
    for workers in (4,) if quick else (4, 8):
        t = {"F": 10.0, "B": 20.0}
        yield emulated(workers, 2 * workers, t, 6, schedules, slow=1.5, scenario="one worker x 1.5, 10/20 ms")


def with_travel(quick: bool) -> Iterator[Contest]:
    """Two hosts, each with half of the workers."""
    schedules = [("rpc-pipe", "1f1b"), ("rpc-pipe", "eager-1f1b"), ("torch", "1F1B"), ("pippy", "1F1B")]
    schedules += [("rpc-pipe by ZeroMQ", "1f1b"), ("rpc-pipe by ZeroMQ", "eager-1f1b"), (BARE, "eager-1f1b")]
    for share in (1.0,) if quick else (0.5, 1.0):
        name = f"travel {share:g} t_F one way, 10/20 ms"
        yield emulated(4, 16, {"F": 10, "B": 20}, 5, schedules, scenario=name, travel_ms=10 * share)


def with_congestion(quick: bool) -> Iterator[Contest]:
    """Two hosts 20 ms apart, payloads of 256 KiB, with congestion controls that pace bursts and that do not."""
    schedules = [("rpc-pipe by ZeroMQ", "1f1b"), ("rpc-pipe", "1f1b"), ("torch", "1F1B"), (BARE, "1f1b")]
    for microbatches in (8,) if quick else (4, 8, 32):
        for congestion in ("reno", "bbr"):
            name = f"20 ms apart, {congestion}, 256 KiB, 10/20 ms"
            apart = partial(emulated, width=2**16, travel_ms=20, congestion=congestion)
            yield apart(2, microbatches, {"F": 10, "B": 20}, 6, schedules, scenario=name)


def with_encryption(quick: bool) -> Iterator[Contest]:
    """Two hosts with a line of 100 Mbit/s: what proofs and encryption cost, of payloads of 64 KiB."""
    schedules = [("rpc-pipe by ZeroMQ", "1f1b"), ("rpc-pipe by ZeroMQ without CURVE", "1f1b"), ("torch", "1F1B")]
    t = {"F": 5, "B": 10}
    yield emulated(
        2, 16, t, 6, schedules, scenario="100 Mbit/s, 64 KiB, 5/10 ms", width=2**14, travel_ms=1, rate="100mbit"
    )


def with_split_backward(quick: bool) -> Iterator[Contest]:
    """Backward in two halves: each system's best."""
    for t in (10, 2):
        schedules = [("rpc-pipe", "zb-h1"), ("rpc-pipe", "zb-v"), ("torch", "ZBVZeroBubble")]
        schedules += [("torch", "InterleavedZeroBubble"), ("pippy", "1F1B")]
        if not quick:
            schedules += [("rpc-pipe", "zb-h2"), ("rpc-pipe", "v-half"), ("rpc-pipe", "dualpipev")]
            schedules += [("torch", "Interleaved1F1B"), ("torch", "DualPipeV"), ("torch", "1F1B")]
            schedules += [("rpc-pipe", "1f1b"), ("pippy", "FillDrain")]
        yield emulated(8, 16, {"F": t, "I": t, "W": t}, 8, schedules, scenario=f"split backward {t} ms")


def real(model: Model, make: str, microbatches: int, steps: int, rows: int, quick: bool) -> Contest:
    """Two workers, one thread each. Same cut, from measured layers, for all; each with its own; and what `plan` says.

    Args:
        make: of `bench.plan_models`, the same model as a user would hand it to `rpc-pipe plan`; none: no plan.
    """
    costs, padded = model.costs(), model.costs(padded=True)
    times = [cost[F] + cost[B] for cost in padded[0]]
    schedules = [("rpc-pipe", "1f1b"), ("torch", "1F1B"), ("pippy", "1F1B"), ("rpc-pipe", "zb-h1")]
    if not quick:
        schedules += [("rpc-pipe", "zb-h2"), ("rpc-pipe", "zb-v"), ("torch", "ZBVZeroBubble"), ("pippy", "FillDrain")]
    cuts: list[tuple[Job, Callable[[int], list[int]]]] = []

    def add(system: str, schedule: str, label: str, cut: Callable[[int], list[int]], **options: Any) -> None:
        job = make_job(system, schedule, 2, microbatches, model.workload(cut), steps, **options)
        cuts.append((replace(job, label=label), cut))

    for system, schedule in schedules:
        add(system, schedule, "", lambda count: balanced(times, count))
    add("pippy", "1F1B", "1F1B, its own cut", lambda count: balanced(model.num_parameters(), count))
    add("torch", "1F1B", "1F1B, even cut", lambda count: _even(len(model.layers), count))
    if make:
        plan = best_plan(make, 2, microbatches)
        cut: list[int] = plan["cut"]
        add("rpc-pipe", plan["schedule"], f"plan: {plan['schedule']}", lambda count: cut, **options_of(plan))

    def cost(job: Job) -> Cost:
        sizes = next(cut for other, cut in cuts if other is job)(job.num_stages)
        return stage_cost(costs if job.system == "rpc-pipe" else padded, sizes)

    return Contest(model.name, [job for job, _ in cuts], cost, rows=rows)


def _even(num_layers: int, count: int) -> list[int]:
    return [num_layers * (i + 1) // count - num_layers * i // count for i in range(count)]


def with_bert(quick: bool) -> Iterator[Contest]:
    """An encoder like BERT's."""
    yield real(bert(8), "make_bert", 8, 5, 16, quick)


def with_resnet(quick: bool) -> Iterator[Contest]:
    """Bottlenecks like ResNet-50's."""
    yield real(resnet(8), "make_resnet", 8, 5, 32, quick)


def with_ragged_text(quick: bool) -> Iterator[Contest]:
    """Lines of text: microbatches of their own length, where the system can; grouped by length; packed into rows."""
    contest = real(ragged(8), "", 8, 8, 32, quick)
    first = contest.jobs[0]
    for label, model in (("by length", ragged_by_length(8)), ("packed", ragged_packed(8))):
        workload = replace(model.workload(lambda count: [4, 4]), order="given" if label == "packed" else "balanced")
        contest.jobs.append(replace(first, workload=workload, label=f"{first.schedule}, {label}"))
    yield replace(contest, cost=lambda job: contest.cost(job if job in contest.jobs[:-2] else first))


def by_message_size(quick: bool) -> Iterator[Contest]:
    """No compute, so a step's time is that of its payloads; and short stages."""
    schedules = [("rpc-pipe", "1f1b"), ("torch", "1F1B"), ("pippy", "1F1B"), *BY_CARRIER]
    for width in (64, 2**18) if quick else (64, 2**12, 2**14, 2**16, 2**18, 2**20):
        name = f"message {4 * width / 1024:g} KiB"
        yield emulated(2, 16, {"F": 0, "B": 0}, 8, schedules, scenario=name, width=width)
    for t in (4.0,) if quick else (0.5, 1.0, 2.0, 4.0, 8.0):
        yield emulated(4, 8, {"F": t, "B": 2 * t}, 8, schedules, scenario=f"short stages {t:g}/{2 * t:g} ms")


def by_size(quick: bool) -> Iterator[Contest]:
    """More workers, more microbatches."""
    schedules = [("rpc-pipe", "1f1b"), ("torch", "1F1B")]
    sizes = [(2, 8), (16, 32)] if quick else [(2, 8), (4, 8), (8, 8), (16, 16), (4, 32), (4, 128), (4, 256), (16, 64)]
    for workers, microbatches in sizes:
        steps = max(2, 128 // microbatches)
        yield emulated(workers, microbatches, {"F": 4, "B": 8}, steps, schedules, scenario="growth 4/8 ms")


def of_ours(quick: bool) -> Iterator[Contest]:
    """What the runtime adds to what the simulator plans, for every schedule."""
    names = "gpipe 1f1b eager-1f1b interleaved hanayo chimera zb-h1 zb-h2 zb-v v-half v-min dualpipe dualpipev".split()
    for workers in (4,) if quick else (4, 8):
        t = {"F": 10, "I": 10, "W": 10}
        schedules = [("rpc-pipe", name) for name in names]
        yield emulated(workers, 2 * workers, t, 6, schedules, scenario="every schedule, 10 ms")


SCENARIOS: dict[str, Callable[[bool], Iterator[Contest]]] = {
    "emulated": on_devices,
    "jitter": with_jitter,
    "slow": with_slow_worker,
    "travel": with_travel,
    "congestion": with_congestion,
    "encryption": with_encryption,
    "split": with_split_backward,
    "bert": with_bert,
    "resnet": with_resnet,
    "ragged": with_ragged_text,
    "message": by_message_size,
    "growth": by_size,
    "schedules": of_ours,
}
