"""`rpc-pipe simulate`: check, simulate and draw a schedule, without workers and without loading torch."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..dependency import Action, ConfigError, G, Kind, Spec
from ..dependency.declared import with_parallelism
from ..dependency.decoding import Decoding
from ..dependency.earlier_steps import lateness
from ..drawing.chrome import write_chrome
from ..drawing.svg import Picture, draw_page, draw_svg
from ..drawing.timeline import draw, row_names
from ..launching.report import Reporter
from ..planning.comparison import describe_staleness
from ..planning.grouping import Grouping
from ..planning.pipe_options import PipeOptions
from ..planning.simulator import Cost, Levels, Link, Outcome, Simulation, simulate
from ..planning.slice_costs import SliceCosts
from ..planning.span import Span, waits
from ..planning.steady import Priced, check_some, price, refuse_long, refuse_many
from ..system.garbage import uncollected
from ..system.sizes import format_bytes

from .options import (  # isort: skip
    COSTS, MEMBERS, SCHEDULE, Pairs, Parser, filled, read_group, read_worker, refuse_typed, try_files, typed_attention,
    typed_costs, typed_lengths, typed_links, typed_spec, write,
)  # fmt: skip
from .readers import link, numbers, positive, size, some, whole

#: most forwards of a run that is simulated action by action, to be drawn
_MOST_LISTED = 5_000
#: most workers that are listed one by one
_MOST_PEAKS = 64
#: options of training, which `--generate` does without
_OF_TRAINING = ("slices", "attention", "microbatch_order", "lengths", "length_cost", *MEMBERS, "gather", "steps")
#: attributes of a run that --json has
_FIGURES = "order", "makespan", "step_time", "span", "bubble", "busy", "peak_activations", "repeated"
#: most lines of a picture that is too wide for one
_MOST_LINES = 120


def add(commands: Any) -> None:
    """Add `simulate` to the command line."""
    parser: Parser = commands.add_parser("simulate", help="check, price and draw a schedule")
    parser.take(*SCHEDULE, "slices", "attention", "order", "microbatch-order", "lengths", "length-cost", "json", *COSTS)
    parser.add_argument("--stage-cost", type=numbers, help="factor of the cost for each stage, such as 1,1,2,1")
    slow = "make workers slower by a factor"
    parser.add_argument("--slow", action=Pairs, const=(positive, "1=1.5"), metavar="WORKER=FACTOR", help=slow)
    parser.take("link")
    levels = "between workers of one group of SIZE neighbours: a node, a rack; the smallest group that has both counts"
    parser.add_argument(
        "--level", action=Pairs, const=(link, "8=0.1,64=1/1MB"), metavar="SIZE=TIME[/BYTES]", help=levels
    )
    parser.add_argument("--uplink", type=some, metavar="BYTES", help="what a worker sends to all, a unit of time")
    payload = "size of a payload, for --uplink and bandwidths of --link"
    parser.add_argument("--payload", type=size, metavar="BYTES", help=payload)
    parser.add_argument("--steps", type=whole(1), help="number of consecutive steps (1)")
    generate = "instead of a step: so many tokens behind prompts; --microbatches groups of sequences"
    parser.add_argument("--generate", type=whole(1), metavar="TOKENS", help=generate)
    cache = "with --generate: keys and values of one token of a group on a stage"
    parser.add_argument("--cache", type=size, metavar="BYTES", help=cache)
    parser.add_argument("--actions", action="store_true", help="with --json: the order of each worker's actions, too")
    parser.add_argument("--svg", metavar="FILE", help="write the timeline as a picture")
    parser.add_argument("--html", metavar="FILE", help="write the timeline as a page to zoom and hover in")
    parser.add_argument("--chrome", metavar="FILE", help="write the timeline for Chrome's tracing or Perfetto")


@uncollected(to_the_end=True)
def command(typed: dict[str, Any], argv: list[str]) -> int:
    spec = typed_spec(typed)
    steps, name = typed.get("steps", 1), typed.get("schedule", "1f1b")
    refuse_long(spec.num_microbatches, steps)
    _, by_microbatch = typed_lengths(typed)(spec)
    cost = _cost(spec, typed, by_microbatch)
    if "generate" in typed:
        spec, cost = _decoding(spec, typed, cost)
    else:
        refuse_typed(typed, ["cache"], "is of --generate TOKENS; add it")
    links, uplinks, sent = _links(typed, spec.num_workers)
    try_files(typed, ("svg", "html", "chrome"))
    check_some(spec)
    reporter = Reporter("json" in typed)
    how: dict[str, Any] = dict(
        comm=typed.get("comm", 0), order=filled(PipeOptions, typed).run_order, steps=steps, links=links,
        uplinks=uplinks, payload=lambda action: sent * spec.share(action),
    )  # fmt: skip
    drawn = [option for option in ("actions", "svg", "html", "chrome") if option in typed]
    result: Priced | Simulation
    if drawn or isinstance(spec, Decoding) or spec.num_stages * spec.num_microbatches * steps <= _MOST_LISTED:
        refuse_many(spec, steps, f"--{', --'.join(drawn)}")
        result = simulate(spec, cost, **how)
        _write_pictures(typed, name, result)
    else:
        result = price(spec, cost, **how)
    _refuse_idle(typed_links(typed, spec.num_workers)[1], result)
    if isinstance(spec, Decoding):
        _tell_generation(reporter, name, result, typed)
        return 0
    if "json" in typed:
        print(json.dumps(_report(name, result, "actions" in typed) | {"members": typed.get("members", 1)}))
        return 0
    if isinstance(result, Simulation):
        width = reporter.console.width
        picture = draw(result.spans, spec.num_workers, width=width, most_lines=_MOST_LINES, spec=spec)
        reporter.console.print(picture)
    first, further = ("first step", result.span) if steps == 1 else (f"{steps} steps", result.step_time)
    took = f"{first} {result.makespan:g}, each further step {further:g}, bubble {result.bubble:.1%}"
    reporter.text(f"{name}: {took}, peak activations {_tell_peaks(result.peak_activations)}")
    for line in [*_tell_unit(spec, typed), *tell_exchange(spec, typed), *describe_staleness(spec)]:
        reporter.text(line)
    return 0


def _decoding(placed: Spec, typed: Mapping[str, Any], cost: Cost) -> tuple[Decoding, Cost]:
    """Return the relation of generation on the workers of a schedule, and the cost of its actions."""
    refuse_typed(typed, _OF_TRAINING, "is of training, and --generate of none; leave one of the two out")
    groups, rounds = placed.num_microbatches, typed["generate"]
    many = (rounds + 1) * groups
    spec = Decoding(num_workers=placed.num_workers, num_microbatches=many, placed=placed, groups=groups)
    refuse_many(spec, 1, "--generate")
    return spec, lambda action: 0 if action.index >= rounds * groups else cost(action)


def _tell_generation(reporter: Reporter, name: str, result: Outcome, typed: Mapping[str, Any]) -> None:
    """Report the time of generation, and the keys and values of new tokens on each worker at the end."""
    assert isinstance(result.spec, Decoding)
    spec, a_group = result.spec, typed["generate"] * typed.get("cache", 1)
    groups = Counter(spec.route(group) for group in range(spec.groups))
    hosted = (spec.hosted(worker) for worker in range(spec.num_workers))
    caches = [a_group * sum(groups[route] for _, route in each) for each in hosted]
    tell, unit = (format_bytes, "") if "cache" in typed else ("{:.9g}".format, " tokens of a group on a stage")
    most = f"keys and values grow to {_tell_peaks(caches, tell)}{unit}, and those of prompts"
    reporter.text(f"{name}: {typed['generate']} tokens take {result.makespan:g}, bubble {result.bubble:.1%}, {most}")
    if "json" in typed:
        print(json.dumps({"schedule": name, "makespan": result.makespan, "bubble": result.bubble, "cached": caches}))


def _tell_peaks(peaks: Sequence[float], told: Callable[[float], str] = "{:.9g}".format) -> str:
    """Return the peak activations of each worker, or the range for many workers."""
    if len(peaks) > _MOST_PEAKS and min(peaks) < max(peaks):
        return f"{told(min(peaks))} to {told(max(peaks))}"
    return ", ".join(map(told, peaks[:1] if len(peaks) > _MOST_PEAKS else peaks))


def _tell_unit(spec: Spec, typed: Mapping[str, Any]) -> list[str]:
    """Return the unit of costs if workers have several stages; such schedules would look too slow otherwise."""
    share = spec.num_workers / spec.num_stages
    if share >= 1 or "cost" in typed:
        return []
    cost = f"--cost F={share:.3g},B={2 * share:.3g}, or rpc-pipe compare, prices stages by their share"
    return [f"a stage costs 1 here, though it is {share:.3g} of a worker's share of the model: {cost}"]


def tell_exchange(spec: Spec, typed: Mapping[str, Any]) -> list[str]:
    """Return a line if replicas or members exchange in no time, as no option prices it."""
    if typed.get("members", 1) > 1 and not {"gather", "model"} & typed.keys():
        return ["members gather weights and sum up results in no time here: --gather TIME gives it a time"]
    is_timed = {"comm", "link", "uplink", "model"} & typed.keys() or G.letter in typed.get("cost", {})
    if is_timed or not any(spec.own_place(worker)[0] for worker in spec.workers):
        return []
    timed = "--payload BYTES with --link TIME/BANDWIDTH or --uplink BYTES of simulate gives the exchange a time"
    return [f"replicas exchange gradients in no time here: {timed}"]


def typed_grouping(typed: Mapping[str, Any], **more: Any) -> Grouping:
    """Return how processes are workers, as typed."""
    return Grouping(typed.get("members", 1), typed.get("shard", ""), typed.get("reduce", "step"), **more)


def gathered(typed: Mapping[str, Any], costs: Mapping[Kind, float]) -> Mapping[Kind, float]:
    """Return the costs of a stage of several members by kind, from the costs in one process."""
    if typed.get("members", 1) == 1:
        refuse_typed(typed, (*MEMBERS[1:], "gather"), "is of members; add --members, such as --members 2")
        return costs
    gather = typed.get("gather", 0)
    return typed_grouping(typed).times(costs, gather, gather)


def _cost(spec: Spec, typed: Mapping[str, Any], by_microbatch: Cost) -> Cost:
    """Return the cost of an action from --cost, --stage-cost, --slow and the factor of its microbatch."""
    by_kind = gathered(typed, typed_costs(typed))
    share = SliceCosts(attention=typed_attention(typed)).time_share(spec)
    by_stage: list[float] = typed.get("stage_cost", [1] * spec.num_stages)
    if len(by_stage) != spec.num_stages:
        said = ",".join(f"{factor:g}" for factor in by_stage)
        has = f"has {len(by_stage)} factors, but there are {spec.num_stages} stages"
        raise ConfigError(f"--stage-cost {said}: {has}")
    by_worker: list[float] = [1] * spec.num_workers
    for worker, factor in typed.get("slow", {}).items():
        by_worker[read_worker(f"--slow {worker}={factor:g}", worker, spec.num_workers)] = factor

    def cost(action: Action) -> float:
        whole = by_kind.get(action.kind, 0) * by_stage[action.stage] * by_worker[spec.worker(action)]
        return whole * share(action) * by_microbatch(action)

    return cost


def _links(
    typed: Mapping[str, Any], num_workers: int
) -> tuple[Mapping[tuple[int, int], Link], dict[int, float], float]:
    """Return the typed links, the workers' uplinks, and the bytes of a payload."""
    usual, others = typed_links(typed, num_workers)
    levels = sorted((read_group("--level", size), way) for size, way in typed.get("level", {}).items())
    links = Levels(num_workers, [*levels, *([(num_workers, usual)] if usual else [])], others)
    uplinks = dict.fromkeys(range(num_workers), typed["uplink"]) if "uplink" in typed else {}
    if not uplinks and all(way.bandwidth == float("inf") for way in links.kinds()):
        refuse_typed(typed, ["payload"], "needs a bandwidth: --link TIME/BANDWIDTH or --uplink BYTES")
    elif "payload" not in typed:
        raise ConfigError("--link, --uplink: a bandwidth needs the size of what is sent: --payload BYTES")
    return links if links.kinds() else {}, uplinks, typed.get("payload", 0)


def _refuse_idle(links: Mapping[tuple[int, int], Link], result: Priced | Simulation) -> None:
    for source, target in links.keys() - result.ways if links else ():
        raise ConfigError(f"--link {source}-{target}: nothing is sent from worker {source} to worker {target}")


def _report(schedule: str, result: Priced | Simulation, with_actions: bool) -> dict[str, Any]:
    spec, orders = result.spec, {}
    late, copies = lateness(spec)
    if with_actions and isinstance(result, Simulation):
        orders = {"orders": [[*map(str, order)] for order in result.orders()]}
    return {
        "schedule": schedule,
        "parameters": spec.parameters(),
        "workers": spec.num_workers,
        "stages": spec.num_stages,
        "microbatches": spec.num_whole,
        **(with_parallelism(None, **asdict(spec.parallelism)) or {}),
        **{name: getattr(result, name) for name in _FIGURES},
        "synchronous": spec.synchronous,
        "staleness": late,
        "weight_copies": copies,
        "actions": result.num_actions,
        **orders,
    }


def _write_pictures(typed: Mapping[str, Any], name: str, result: Simulation) -> None:
    spec = result.spec
    title = f"{name}, {spec.num_workers} workers, {spec.counted}"
    picture = Picture(title, result.spans, spec.num_workers, spec=spec, num_stages=spec.num_stages, ends=True)
    if "svg" in typed:
        write(typed["svg"], draw_svg(picture))
    if "html" in typed:
        unit = "of --cost and --comm" if "cost" in typed else "in which a stage's forward takes 1"
        notes = [f"time in units {unit}"]
        causes = waits(spec, result.spans)
        hosted = {worker: spec.hosted(worker) for worker in range(spec.num_workers)}
        rows = row_names(hosted, spec.num_routes, spec.parallelism.replicas)
        write(typed["html"], draw_page([replace(picture, waits=causes, notes=notes, rows=rows)]))
    if "chrome" in typed:
        write_chrome(typed["chrome"], spec, _by_step(result.spans))


def _by_step(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Return the run actions by step: one of each in every step, or one in all steps of a stream, which overlap."""
    steps: dict[int, list[Span]] = defaultdict(list)
    times: Counter[Action] = Counter()
    for span in spans:
        steps[times[span.action]].append(span)
        times[span.action] += 1
    return steps
