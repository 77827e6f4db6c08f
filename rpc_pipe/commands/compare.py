"""`rpc-pipe compare`: all schedules side by side, simulated. Only measuring a model loads torch."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from ..dependency import ConfigError, check_all
from ..dependency.declared import REPLICAS, with_parallelism
from ..launching.report import Reporter
from ..planning.comparison import ModelCosts, Row, compare, verdict
from ..planning.footprint import Size
from ..planning.pipe_options import PipeOptions
from ..planning.steady import refuse_long
from ..system.sizes import format_bytes

from .options import (  # isort: skip
    COSTS, MAKE, Pairs, Parser, filled, refuse_typed, schedule_options, typed_attention, typed_costs, typed_lengths,
    typed_spec,
)  # fmt: skip
from .profile import load, progress, refuse_unplanned
from .readers import rate, size
from .simulate import gathered, tell_exchange, typed_grouping
from .topology import AMONG_MEMBERS, SUMMING_MEMBERS


def add(commands: Any) -> None:
    """Add `compare` to the command line."""
    parser: Parser = commands.add_parser("compare", help="all schedules side by side: time, memory, messages")
    parser.epilog = "--schedule adds one of yours, or a built-in one with other parameters; stages of 1/v cost 1/v."
    parser.take("schedule", "set", "workers", "microbatches", *REPLICAS, "slices", "attention", "order", "json")
    parser.take("microbatch-order", "lengths", "length-cost", *COSTS)
    parser.add_argument(
        "--memory", metavar="WHAT=BYTES", action=Pairs, const=(size, "activations=64MB,limit=8GB", {"copy": rate}),
        help="bytes of a worker's share: weights, gradients, optimizer, activations, after_inputs (kept from I to W), "
        "inputs (between stages), working (while an action runs); limit=BYTES leaves out what does not fit; copy=BYTES "
        "a unit of time, or BYTES/s where times are milliseconds, as of --model: kinds that move some take their time",
    )  # fmt: skip
    parser.add_argument("--model", metavar="FILE.py:make", help=f"measure the blocks of your model here: {MAKE}")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    if "schedule" not in typed:
        refuse_typed(typed, ["set"], "is of the schedule that --schedule adds; name it")
    options, reporter, also = filled(PipeOptions, typed), Reporter(), _also(typed)
    refuse_long(options.num_microbatches)
    replicas = with_parallelism(None, **{name: typed[name] for name in REPLICAS if name in typed}) or {}
    slices = typed.get("slices")
    # Otherwise every row would be refused for it.
    plain = replace(options, schedule="gpipe", schedule_options={**replicas, **({"slices": slices} if slices else {})})
    spec, unequal, members = plain.of_plane(), typed_lengths(typed), typed.get("members", 1)
    limit, model = _model(typed, options, spec.num_workers)
    unequal(spec)
    with progress(reporter, "simulating") as tell:
        rows = compare(
            model, spec.num_whole, comm=typed.get("comm", 0), limit=limit, order=options.run_order, also=also,
            slices=slices, attention=typed_attention(typed), unequal=unequal, replicas=replicas, tell=tell,
            members=members,
        )  # fmt: skip
    if "json" in typed:
        print(json.dumps([{**dataclasses.asdict(row), "parameters": dict(row.parameters)} for row in rows]))
        return 0
    said = f" of {members} members" * (members > 1) + f", {options.num_microbatches} microbatches"
    said += "".join(f", {name} {value}" for name, value in replicas.items())
    reporter.console.print(table(rows, f"{spec.num_workers} workers{said}"))
    for line in [verdict(rows, limit), *tell_exchange(spec, typed)]:
        reporter.text(line)
    return 0


def _model(typed: Mapping[str, Any], options: PipeOptions, workers: int) -> tuple[float | None, ModelCosts]:
    """Return the limit of memory, and the costs of --model as measured, or the typed costs."""
    sizes = {**typed.get("memory", {})}
    limit, copy = sizes.pop("limit", None), sizes.pop("copy", float("inf"))
    known = [field.name for field in dataclasses.fields(Size) if field.name != "outputs"]
    for key, value in sizes.items():
        if key not in known:
            raise ConfigError(f"--memory {key}: known are {', '.join(known)}, limit, copy")
        if "model" in typed:
            raise ConfigError(f"--memory {key}={value:g}: --model measures it; leave one out")
    if "model" not in typed:
        for key, value in typed.get("memory", {}).items() if not sizes else ():
            raise ConfigError(f"--memory {key}={value:g}: needs sizes, such as activations=64MB, or --model")
        size = [Size(**sizes, outputs=sizes.get("inputs", 0))] if sizes else []
        size = [typed_grouping(typed).size(each, each.weights) for each in size]
        return limit, ModelCosts(workers, [gathered(typed, typed_costs(typed))], size, copy=copy)
    refuse_typed(typed, ["cost", "gather"], f"--model {typed['model']} is measured; leave one of the two out")
    from ..planning.measuring.profiling import profile_model

    user_model, of_batch = load(typed)
    rows = max(1, of_batch // options.num_microbatches)
    link = SUMMING_MEMBERS if typed.get("shard") == "tp" else AMONG_MEMBERS
    grouping, profile = typed_grouping(typed, link=link), profile_model(user_model, [rows])
    refuse_unplanned(profile, grouping.shard)
    times, held = zip(*((block.times, block.size) for block in map(grouping.cost, profile.at(rows))), strict=True)
    return limit, ModelCosts(workers, times, held, by_layer=True, copy=copy)


def _also(typed: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the schedule of `--schedule` and its parameters."""
    if "schedule" not in typed:
        return None
    spec = typed_spec(typed)
    check_all(spec)
    values = spec.parameters()
    said = {key: text for key, text in schedule_options(typed).items() if key not in typed}  # these are of all rows
    return typed["schedule"], {key: values.get(key, text) for key, text in said.items()}


def table(rows: Sequence[Row], title: str) -> Table:
    """Return a table of at most 80 columns, with the times of a first step and of each further one.

    `acts` are activations in worker's shares; `copies` are copies of weights on the worker with most. Asynchronous
    schedules are marked with the staleness of their gradients, in updates; synchronous ones that hold more than one
    copy of the weights by a star.
    """
    drawn = Table(title=title, box=None, pad_edge=False)
    drawn.add_column("schedule", no_wrap=True)
    headings = ["first", "further", "bubble", "acts"]
    with_memory = any(row.peak_memory is not None for row in rows)
    for heading in [*headings, *(["memory"] if with_memory else []), "msgs", "copies"]:
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.refused and not row.makespan:
            continue
        memory = [format_bytes(row.peak_memory or 0)] if with_memory else []
        late = f" ({max(row.staleness)} late)" if max(row.staleness) else " (asynchronous)"
        figures = f"{row.makespan:.5g}", f"{row.step_time:.5g}", f"{row.bubble:.1%}", f"{row.peak_activations:.3g}"
        copies, style = f"{max(row.weight_copies)}{'*' * row.replicates}", "dim" if row.refused else None
        drawn.add_row(row.name + late * row.overtakes, *figures, *memory, str(row.messages), copies, style=style)
    return drawn
