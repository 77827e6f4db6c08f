"""`rpc-pipe compare`: all schedules side by side, simulated. Only measuring a model loads torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ..dependency import ConfigError, check_all
from ..drawing.comparison import table
from ..launching.report import Reporter
from ..planning.compare import ModelCosts, Row, compare, verdict
from ..planning.footprint import Size
from ..planning.specs import PipeOptions, make_spec, with_replicas
from .options import (
    Parser,
    add_attention,
    add_costs,
    add_json,
    add_order,
    add_slices,
    filled,
    parse_assignments,
    parse_bytes,
    parse_costs,
    parse_number,
    schedule_options,
    typed_attention,
    typed_spec,
    whole,
)
from .profile import progress


def add(commands: Any) -> None:
    """Add `compare` to the command line."""
    parser: Parser = commands.add_parser("compare", help="all schedules side by side: time, memory, messages")
    parser.add_argument(
        "--schedule", help="add one of your own, path/to/file.py:ClassName, or a built-in one with other parameters"
    )
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="set a parameter of --schedule")
    parser.add_argument("--workers", type=whole(1), help="number of workers (2)")
    parser.add_argument("--microbatches", type=whole(1), help="microbatches of a step (8)")
    parser.add_argument("--replicas", type=whole(1), help="replicas of the pipeline, which share the workers (1)")
    add_slices(parser)
    add_attention(parser)
    add_order(parser)
    add_json(parser)
    add_costs(parser, "of a worker's share of the model: stages of 1/v share cost 1/v")
    parser.add_argument(
        "--memory", metavar="KEY=BYTES,...", action="append",
        help="bytes of a worker's share: weights, gradients, optimizer, activations (a microbatch's), after_inputs "
        "(kept from I to W), inputs (between stages), working (while an action runs); limit=BYTES leaves out what does "
        "not fit",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="FILE.py:make",
        help="measure the blocks of your model on this machine: a function that returns model, batch (and loss_fn)",
    )  # fmt: skip
    parser.set_defaults(command=_compare)


def _compare(typed: dict[str, Any], argv: list[str]) -> int:
    if "schedule" not in typed and "set" in typed:
        raise ConfigError(f"--set {typed['set'][0]}: is of the schedule that --schedule adds; name it")
    if "model" in typed:
        return _compare_own(typed)
    options = filled(PipeOptions, typed)
    comm = parse_number("--comm", typed.get("comm", "0"))
    limit, sizes = _memory(typed)
    model = ModelCosts(options.workers, [parse_costs(typed.get("cost", ""))], sizes)
    return _show(typed, model, options, comm, limit)


def _compare_own(typed: dict[str, Any]) -> int:
    if "cost" in typed:
        raise ConfigError(f"--cost: --model {typed['model']} is measured; leave one of the two out")
    limit, _ = _memory(typed)
    options = filled(PipeOptions, typed)
    import torch

    from ..planning.measuring.profiling import load_user_model, profile_model, rows_of

    torch.set_num_threads(options.threads)
    user_model = load_user_model(typed["model"])
    rows = max(1, rows_of(user_model.batch) // options.microbatches)
    blocks = profile_model(user_model, [rows]).at(rows)
    model = ModelCosts(options.workers, [b.times for b in blocks], [b.size for b in blocks], by_layer=True)
    return _show(typed, model, options, parse_number("--comm", typed.get("comm", "0")), limit)


def _show(typed: Mapping[str, Any], model: ModelCosts, options: PipeOptions, comm: float, limit: float | None) -> int:
    reporter, also = Reporter(), _also(typed)
    replicas, slices = typed.get("replicas", 1), typed.get("slices")
    # Otherwise every row would be refused for it.
    make_spec("gpipe", options.workers, options.microbatches, with_replicas(None, replicas), slices)
    with progress(reporter) as bar:
        task = bar.add_task("simulating", total=1.0)
        rows = compare(
            model, options.microbatches, comm=comm, limit=limit, order=options.order, also=also,
            slices=slices, attention=typed_attention(typed), replicas=replicas,
            tell=lambda share: bar.update(task, completed=share),
        )  # fmt: skip
    if "json" in typed:
        print(json.dumps([_as_json(row) for row in rows]))
        return 0
    console = reporter.console
    console.print(table(rows, options.workers, options.microbatches))
    console.print(verdict(rows, limit), markup=False)
    return 0


def _also(typed: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the schedule of `--schedule` and its parameters."""
    if "schedule" not in typed:
        return None
    spec = typed_spec(typed)
    check_all(spec)
    values = spec.parameters()
    said = {key: text for key, text in schedule_options(typed).items() if key not in ("replicas", "slices")}
    return typed["schedule"], {key: values.get(key, text) for key, text in said.items()}


def _as_json(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "parameters": dict(row.parameters)}


def _memory(typed: Mapping[str, Any]) -> tuple[float | None, list[Size]]:
    """Return the limit of memory, and the bytes of a worker's share, if given."""
    texts = parse_assignments("--memory", typed.get("memory", []))
    sizes = {key: parse_bytes(f"--memory {key}=", text) for key, text in texts.items()}
    limit = sizes.pop("limit", None)
    known = [field.name for field in dataclasses.fields(Size) if field.name != "outputs"]
    for key in sizes:
        if key not in known:
            raise ConfigError(f"--memory {key}: known are {', '.join(known)}, limit")
        if "model" in typed:
            raise ConfigError(f"--memory {key}={texts[key]}: --model measures it; leave one out")
    if limit is not None and not sizes and "model" not in typed:
        raise ConfigError(
            f"--memory limit={texts['limit']}: add sizes to compare with, such as activations=64MB; or --model"
        )
    return limit, [Size(**sizes, outputs=sizes.get("inputs", 0))] if sizes else []
