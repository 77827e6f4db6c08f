"""`rpc-pipe plan`: the fastest plan for a model on given workers within their memory."""

import json
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..dependency.declared import EXCHANGE, FSDP, with_parallelism
from ..drawing.plans import front_svg, front_text, plans_table
from ..launching.report import Reporter
from ..planning.advice import Advice, binding_limits, changes_that_fit, remarks
from ..planning.grouping import ALONE, Grouping
from ..planning.pipe_options import workers_of
from ..planning.plan import read_plan, to_json_value
from ..planning.profile import Machines, Profile, as_json
from ..planning.program_search import faster_program
from ..planning.search import PlanRequest, PlanResult, default_microbatches, refuse_unknown, search
from ..planning.simulator import Link
from ..planning.specs import make_spec
from ..planning.unequal import refuse_without
from ..system.files import DAMAGED, read_json
from ..system.sizes import format_bytes
from .options import MAKE, Parser, refuse_typed, try_files, typed_links, write
from .profile import add_measuring, find_profile, load, progress, refuse_unplanned, show_loading, with_slices
from .readers import link, memory, positive, whole, wholes
from .topology import AMONG_MEMBERS, HERE, SUMMING_MEMBERS, machines_of, read_topology

#: default of --seconds
_SECONDS = 20.0
#: seconds of the search before a run with --plan auto
_AUTO_SECONDS = 8.0
#: most seconds of the search of programs
_PROGRAM_SECONDS = 6.0
#: most plans in JSON
_MOST_PLANS = 50
#: most measuring processes for each core
_PROCESSES_A_CORE = 4


def add(commands: Any) -> None:
    """Add `plan` to the command line."""
    parser: Parser = commands.add_parser("plan", help="find the fastest schedule and cut for a model within memory")
    add_measuring(parser)
    parser.take("workers")
    room = "memory of each worker, such as 8GB (no limit); or 8GB,copy=12GB/s, with its bandwidth to host memory"
    parser.add_argument("--memory", type=memory, metavar="BYTES", help=room)
    parser.add_argument("--batch", type=whole(1), help="rows of a step's batch (those of the batch that make returns)")
    parser.add_argument("--microbatches", type=_counts, help="numbers of microbatches to try (workers x 1, 2, 4, 8)")
    lengths = "length of rows in each microbatch, such as 64,512,128 (all as measured)"
    parser.add_argument("--lengths", type=wholes, metavar="L,L,...", help=lengths)
    parser.add_argument("--replicas", type=_counts, help="numbers of replicas of the pipeline to try, such as 1,2 (1)")
    parser.add_argument("--slices", type=_slices, help="numbers of slices to try, such as 1,4; auto: 1,2,4,8 (1)")
    parser.add_argument("--members", type=_counts, help="numbers of processes to try as one worker, such as 1,2 (1)")
    parser.add_argument("--shard", type=_shards, metavar="fsdp,tp", help="how members may share a stage: one or more")
    parser.take("reduce", *EXCHANGE, "microbatch-order", "json")
    parser.add_argument("--topology", metavar="FILE", help="JSON: memory and speed of each worker, links between them")
    parser.take("link")
    parser.add_argument("--member-link", type=link, metavar="MS[/BANDWIDTH]", help="between members (gloo's, measured)")
    parser.add_argument("--alone", action="store_true", help="measure in a single process instead of one per worker")
    parser.add_argument("--schedule", action="append", metavar="NAME", help="consider only this; may be repeated")
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations")
    parser.add_argument("--seconds", type=positive, help=f"how long to search ({_SECONDS:g})")
    parser.add_argument("--no-searched", action="store_true", help="consider only named schedules, search no program")
    parser.add_argument("--output", metavar="FILE", help="write the plans, for run --plan and Pipeline(plan=...)")
    parser.add_argument("--svg", metavar="FILE", help="write time against memory as a picture")


def _counts(text: str) -> list[int]:
    return sorted(set(wholes(text)))


def _shards(text: str) -> list[str]:
    known = (*FSDP, "tp")
    for each in (found := [*dict.fromkeys(text.split(","))]):
        if each not in known:
            raise ArgumentTypeError(f"{each}: known are {', '.join(known)}")
    return found


def _slices(text: str) -> list[int]:
    return [1, 2, 4, 8] if text == "auto" else _counts(text)


def command(typed: dict[str, Any], argv: list[str]) -> int:
    reporter = Reporter("json" in typed)
    try_files(typed, ("output", "svg"))
    refuse_unknown(typed.get("schedule", ()))
    seconds = typed.get("seconds", _SECONDS)
    request, _ = _request(typed, seconds, reporter)
    with progress(reporter, "searching") as tell:
        result = search(request, tell)
    if result.plans and not {"no_searched", "lengths"} & typed.keys():
        with progress(reporter, "listing") as tell:
            plan = faster_program(request, result, tell, min(_PROGRAM_SECONDS, seconds / 4))
        if plan is not None:
            result.plans.insert(0, plan)
            result.front = [plan, *(other for other in result.front if other.predicted_memory < plan.predicted_memory)]
    for plans in (result.plans, result.front) if "microbatch_order" in typed else ():
        plans[:] = [replace(plan, microbatch_order=request.order) for plan in plans]
    advice = binding_limits(request, result) if result.plans else changes_that_fit(request, result)
    here = request.profile.device == "cpu" and not {"topology", "link"} & typed.keys()
    notes = list(remarks(request, result, len(os.sched_getaffinity(0)) if here else None)) if result.plans else []
    told = {**_as_json(request, result, advice), "remarks": notes}
    if "output" in typed:
        write(typed["output"], json.dumps(told, indent=1))
    if "svg" in typed:
        title = f"{request.profile.model}: {request.machines.num_workers} workers, batch of {request.batch}"
        write(typed["svg"], front_svg(result.front, title))
    if "json" in typed:
        print(json.dumps(told))
    else:
        _show(request, result, advice, typed, reporter)
        for note in notes:
            reporter.text(f"note: {note}")
    if not result.plans and "json" in typed:
        reporter.text(_nothing_fits(result))
    return 0 if result.plans else 1


def _machines(typed: dict[str, Any]) -> Machines:
    """Return the workers of --topology or --workers, with the links that were typed.

    Raises:
        ConfigError: the options contradict each other.
    """
    machines = Machines(typed.get("workers", 2), link=HERE)
    if "topology" in typed:
        machines = read_topology(typed["topology"])
        if typed.get("workers", machines.num_workers) != machines.num_workers:
            refuse_typed(typed, ["workers"], f"{typed['topology']} has {machines.num_workers} workers; leave it out")
    if "link" in typed:
        usual, links = typed_links(typed, machines.num_workers)
        links = {**machines.links, **{ends: _a_millisecond(way) for ends, way in links.items()}}
        machines = replace(machines, link=_a_millisecond(usual) if usual else machines.link, links=links)
    room, own = typed.get("memory", {}), machines.memory or (None,) * machines.num_workers
    memory = tuple(min(each or math.inf, room["limit"]) for each in own) if "limit" in room else machines.memory
    return replace(machines, memory=memory, copy=room.get("copy", machines.copy))


def _a_millisecond(way: Link) -> Link:
    """Return a link with its bandwidth in bytes a millisecond."""
    return way._replace(bandwidth=way.bandwidth / 1e3)


def _as_measured(machines: Machines, profile: Profile, typed: dict[str, Any]) -> Machines:
    """Return the workers with the measured speeds and links where none were typed."""
    if "topology" in typed or not profile.topology or profile.workers != machines.num_workers:
        return machines
    found = machines_of("the profile's topology", profile.topology)
    links: Any = {} if "link" in typed else {"link": found.link, "links": found.links}
    return replace(machines, slowness=found.slowness, **links)


def _together(typed: dict[str, Any], workers: int) -> int:
    """Return the number of measuring processes: one a worker, if the workers are on this machine; 0: this process."""
    elsewhere = any(name in typed for name in ("topology", "link", "alone", "estimate"))
    most = _PROCESSES_A_CORE * len(os.sched_getaffinity(0))
    return workers if 1 < workers <= most and not elsewhere else 0


def kept_plan(typed: dict[str, Any], reporter: Reporter) -> tuple[Path, str]:
    """Return the file of the plan that is kept beside a model's profile, and a message; make it if there is none.

    Raises:
        ConfigError: nothing fits.
    """
    request, profile_path = _request(typed, _AUTO_SECONDS, reporter)
    path = profile_path.with_name(f"plan-{profile_path.name.removeprefix('profile-')}")
    of = {name: typed[name] for name in ("workers", "memory") if name in typed}
    of = json.loads(json.dumps({**of, "batch": request.batch, "measured": as_json(request.profile)}))
    plan, word = None, "plan kept"
    with suppress(*DAMAGED, ConfigError):  # or missing
        told = read_json(path, str(path))
        plan = read_plan(told) if told.get("of") == of else None
    if plan is None:
        plan, word = next(iter(search(request).plans), None), "planned"
        if plan is None:
            raise ConfigError("plan=auto: nothing fits; rpc-pipe plan says by how much, and what would")
        write(str(path), json.dumps({"plans": [plan.as_json()], "of": of}, indent=1))
    how = f"{plan.num_microbatches} microbatches, cut {','.join(map(str, plan.cut))}"
    return path, f"{word}: {plan.name}, {how}: {plan.predicted_ms:.4g} ms a step"


def _groupings(typed: dict[str, Any], members: list[int], shards: list[str]) -> tuple[Grouping, ...]:
    """Return how processes may be workers, each way once."""
    given = _a_millisecond(typed["member_link"]) if "member_link" in typed else None
    ways = {shard: given or (SUMMING_MEMBERS if shard == "tp" else AMONG_MEMBERS) for shard in shards}
    shared = [(shard, typed.get("reduce", "step"), way) for shard, way in ways.items()]
    return tuple(dict.fromkeys(Grouping(size, *how) if size > 1 else ALONE for size in members for how in shared))


def _request(typed: dict[str, Any], seconds: float, reporter: Reporter) -> tuple[PlanRequest, Path]:
    """Return the request, with a profile for the microbatches to try, and the profile's file."""
    if not {"model", "profile"} & typed.keys():
        raise ConfigError(f"plan: needs path/to/file.py:make, {MAKE}; or --profile FILE")
    machines, lengths = _machines(typed), list[int](typed.get("lengths", []))
    workers = machines.num_workers
    show_loading(typed, reporter)
    if not {"batch", "model"} & typed.keys():
        raise ConfigError("--batch: needed with --profile; give the rows of a step's batch")
    batch = typed["batch"] if "batch" in typed else load(typed)[1]
    default = (len(lengths),) if lengths else default_microbatches(workers, batch)
    counts: Sequence[int] = typed.get("microbatches", default)
    if lengths and list(counts) != [len(lengths)]:
        refuse_typed(typed, ["microbatches"], f"--lengths has {len(lengths)} numbers; give one for each microbatch")
    if max(counts) > batch:
        raise ConfigError(f"--microbatches {max(counts)}: a batch has {batch} rows; at most {batch}")
    rows = sorted({max(1, round(batch / count)) for count in counts})
    # Sizes in between are interpolated from the ends and the middle.
    wanted = sorted({rows[0], rows[len(rows) // 2], rows[-1]})
    replicas, members, slices = (list[int](typed.get(name, [1])) for name in ("replicas", "members", "slices"))
    exchange, shards = {name: typed[name] for name in EXCHANGE if name in typed}, list[str](typed.get("shard", [""]))
    planes = {size: min(Grouping(size, shard).planes for shard in shards) for size in members}
    if lengths and any(Grouping(max(members), shard).planes > 1 for shard in shards):
        refuse_typed(typed, ["shard"], "divides microbatches, of which --lengths tells no part; leave one out")
    for each, size in product(replicas, members):  # otherwise all their candidates would be left out
        options = with_parallelism(exchange if each == max(replicas) else None, replicas=each)
        make_spec("gpipe", workers_of(workers, size), max(1, max(counts) // planes[size]), options)
    least = workers // max(replicas) // max(members)
    profile, path = find_profile(typed, wanted, reporter, at_least=least, together=_together(typed, workers))
    profile = with_slices(typed, profile, path, max(slices), reporter)
    if lengths:
        refuse_without(profile, f"--profile {path}")
    if (blocks := profile.num_blocks) < least:
        raise ConfigError(f"--workers {least}: the model has {blocks} blocks; use at most {blocks} workers")
    for shard in shards:
        refuse_unplanned(profile, shard)
    if profile.workers not in (0, workers):
        advice = f"profile --workers {workers} --again measures for {workers}"
        reporter.text(f"--profile {path}: measured while {profile.workers} workers were busy: {advice}")
    request = PlanRequest(
        profile, _as_measured(machines, profile, typed), batch, tuple(counts), recompute="no_recompute" not in typed,
        schedules=tuple(typed["schedule"]) if "schedule" in typed else None, replicas=tuple(replicas),
        exchange=exchange, slices=tuple(slices), groupings=_groupings(typed, members, shards),
        lengths=tuple(lengths), order=typed.get("microbatch_order", "given"), seconds=seconds,
    )  # fmt: skip
    return request, path


def _as_json(request: PlanRequest, result: PlanResult, advice: Sequence[Advice]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "plans": [plan.as_json() for plan in result.plans[:_MOST_PLANS]],
        "front": [plan.as_json() for plan in result.front],
        "advice": to_json_value(advice),
        "not_priced": result.left_out,
        "do_not_fit": result.unfit,
        "workers": request.machines.num_workers,
        "batch": request.batch,
        **({"lengths": request.lengths} if request.lengths else {}),
        "measured": as_json(request.profile),
    }
    if result.nearest is not None:
        told["nearest"] = result.nearest.as_json()
        told["excess_mb"] = result.excess / 1e6
    return told


def _show(
    request: PlanRequest, result: PlanResult, advice: Sequence[Advice], typed: dict[str, Any], reporter: Reporter
) -> None:
    profile, workers = request.profile, request.machines.num_workers
    sizes = f"{profile.num_blocks} blocks, {workers} workers, batch of {request.batch}"
    reporter.text(f"{profile.model or 'model'}: {sizes}")
    if not result.plans:
        for line in (_nothing_fits(result), *(f"  would fit: {each.sentence}" for each in advice)):
            reporter.text(line)
        return
    reporter.console.print(plans_table(result.plans))
    if result.left_out:
        reporter.text(f"not priced: {', '.join(result.left_out)}")
    if result.unfit:
        reporter.text(f"no cut that fits was found of: {', '.join(result.unfit)}")
    reporter.text(f"time against memory:\n{front_text(result.front)}")
    for each in advice:
        reporter.text(f"would be faster: {each.sentence}")
    if "output" in typed:
        runs = f"--model {typed['model']}" if "model" in typed else "SCRIPT"
        reporter.text(f"written to {typed['output']}: rpc-pipe run {runs} --plan {typed['output']}")


def _nothing_fits(result: PlanResult) -> str:
    nearest = result.nearest
    if nearest is None:
        return "nothing fits: no schedule has as few stages as the model has blocks"
    least = f"{nearest.name} with {nearest.num_microbatches} microbatches"
    return f"nothing fits: the least is {format_bytes(result.excess)} too much, by {least}"
