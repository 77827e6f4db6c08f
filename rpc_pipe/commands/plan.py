"""Commands that plan: simulate, compare, export, schedules. No worker is started; only measuring loads torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..demo.settings import TrainOptions
from ..dependency import Action, ConfigError, PipeError, Spec, check_all
from ..drawing.chrome import write_chrome
from ..drawing.comparison import table
from ..drawing.page import Picture, draw_page
from ..drawing.svg import draw_svg
from ..drawing.timeline import draw
from ..launching.report import Reporter
from ..planning.compare import ModelCosts, Row, compare, verdict
from ..planning.footprint import Size
from ..planning.options import (
    make_spec,
    parameter_types,
    parse_assignments,
    parse_bytes,
    parse_costs,
    parse_factors,
    parse_links,
    parse_number,
    schedule_options,
)
from ..planning.simulator import Cost, Simulation, simulate
from ..planning.torch_csv import export_csv
from ..planning.waits import waits
from ..schedules import SCHEDULES

#: more actions than this are not drawn in the terminal
_MOST_DRAWN = 4000


def add_commands(commands: Any, add_schedule_options: Callable[[argparse.ArgumentParser, Any], None]) -> None:
    """Add the planning commands to the command line."""
    defaults = TrainOptions()
    plan = commands.add_parser("simulate", help="check, price and draw a schedule")
    add_schedule_options(plan, defaults)
    _add_costs(plan)
    plan.add_argument("--stage-cost", metavar="FACTORS", help="times the cost, by stage, such as 1,1,2,1")
    plan.add_argument("--slow", action="append", default=[], metavar="WORKER=FACTOR", help="a slower worker")
    plan.add_argument(
        "--link", action="append", default=[], metavar="FROM-TO=TIME[/BANDWIDTH]",
        help="travel time of one link, and its bytes a unit of time, such as 0-1=2.5/1MB",
    )  # fmt: skip
    plan.add_argument("--payload", default="0", metavar="BYTES", help="of what a stage sends, for --link (0)")
    plan.add_argument("--steps", type=int, default=1, help="steps in sequence (1)")
    plan.add_argument("--svg", metavar="FILE", help="write the timeline as a picture")
    plan.add_argument("--html", metavar="FILE", help="write the timeline as a page to zoom and hover in")
    plan.add_argument("--chrome", metavar="FILE", help="write the timeline for Chrome's tracing or Perfetto")
    plan.set_defaults(command=_simulate)

    side_by_side = commands.add_parser("compare", help="all schedules side by side: time, memory, messages")
    side_by_side.add_argument("--workers", type=int, default=defaults.workers, help="workers (2)")
    side_by_side.add_argument("--microbatches", type=int, default=defaults.microbatches, help="a step's (8)")
    side_by_side.add_argument("--order", choices=("ready", "fixed"), help="each schedule's own by default")
    side_by_side.add_argument("--json", action="store_true", help="print JSON")
    _add_costs(side_by_side, "of a worker's share of the model: stages of 1/v share cost 1/v")
    side_by_side.add_argument(
        "--memory", metavar="KEY=BYTES,...", action="append", default=[],
        help="bytes of a worker's share: weights, gradients, optimizer, activations (a microbatch's), after_inputs "
        "(of these, from I to W), inputs (between stages); limit=BYTES leaves out what does not fit",
    )  # fmt: skip
    side_by_side.add_argument(
        "--measure", action="store_true", help="time and weigh the built-in GPT's layers here instead"
    )
    for name in ("width", "depth", "heads", "context", "batch"):
        side_by_side.add_argument(f"--{name}", type=int, default=getattr(defaults, name), help="of the GPT to measure")
    side_by_side.set_defaults(command=_compare)

    export = commands.add_parser("export", help="write a schedule as torch.distributed.pipelining's CSV of actions")
    add_schedule_options(export, defaults)
    export.add_argument("file", nargs="?", help="where to; by default it is printed")
    export.set_defaults(command=_export)

    schedules = commands.add_parser("schedules", help="list the schedules")
    schedules.add_argument("--json", action="store_true", help="print JSON")
    schedules.set_defaults(command=_schedules)


def _add_costs(parser: argparse.ArgumentParser, more: str = "") -> None:
    text = f"time by kind {more}".rstrip()
    parser.add_argument("--cost", default="F=1,B=2,I=1,W=1,R=1", help=f"{text} (F=1,B=2,I=1,W=1,R=1)")
    parser.add_argument("--comm", default="0", help="time of a payload between two workers (0)")


def _cost(spec: Spec, parsed: argparse.Namespace) -> Cost:
    """Return the cost of an action from --cost, --stage-cost and --slow."""
    by_kind = parse_costs(parsed.cost)
    by_stage = parse_factors("--stage-cost", parsed.stage_cost, spec.num_stages, "stages")
    slow = parse_assignments("--slow", parsed.slow)
    by_worker = [1.0] * spec.num_workers
    for worker, factor in slow.items():
        if not worker.isdigit() or int(worker) >= spec.num_workers:
            raise ConfigError(f"--slow {worker}={factor}: workers are 0 to {spec.num_workers - 1}")
        by_worker[int(worker)] = parse_number(f"--slow {worker}", factor)

    def cost(action: Action) -> float:
        plain = by_kind.get(action.kind, 0)
        if not slow and parsed.stage_cost is None:
            return plain
        return plain * by_stage[action.stage] * by_worker[spec.worker(action)]

    return cost


def _simulate(parsed: argparse.Namespace, argv: list[str]) -> int:
    spec = make_spec(parsed.schedule, parsed.workers, parsed.microbatches, schedule_options(parsed.set, parsed.window))
    cost, comm = _cost(spec, parsed), parse_number("--comm", parsed.comm)
    links = parse_links("--link", parsed.link, spec.num_workers)
    size = parse_bytes("--payload", parsed.payload)
    if parsed.steps < 1:
        raise ConfigError(f"--steps {parsed.steps}: must be at least 1")
    check_all(spec)
    reporter = Reporter()
    try:
        result = simulate(
            spec, cost, comm=comm, order=parsed.order, steps=parsed.steps, links=links, payload=lambda _: size
        )
    except PipeError as error:
        reporter.error(str(error))
        return 1
    _write_pictures(parsed, result)
    if parsed.json:
        print(json.dumps(_report(parsed.schedule, result)))
        return 0
    if len(result.spans) <= _MOST_DRAWN:
        reporter.console.print(draw(result.spans, spec.num_workers, width=reporter.console.width))
    a_step = f", step {result.step_time:g}" if parsed.steps > 1 else ""
    reporter.console.print(
        f"{parsed.schedule}: makespan {result.makespan:g}{a_step}, span {result.span:g}, bubble {result.bubble:.1%}, "
        f"peak activations {', '.join(map(str, result.peak_activations))}"
    )
    return 0


def _report(schedule: str, result: Simulation) -> dict[str, Any]:
    spec, orders = result.spec, result.orders()
    return {
        "schedule": schedule,
        "parameters": spec.parameters(),
        "workers": spec.num_workers,
        "stages": spec.num_stages,
        "microbatches": spec.num_microbatches,
        "order": result.order,
        "makespan": result.makespan,
        "step_time": result.step_time,
        "span": result.span,
        "bubble": result.bubble,
        "busy": list(result.busy),
        "peak_activations": list(result.peak_activations),
        "actions": sum(map(len, orders)),
        "orders": [[str(action) for action in order] for order in orders],
    }


def _write_pictures(parsed: argparse.Namespace, result: Simulation) -> None:
    spec = result.spec
    title = f"{parsed.schedule}, {spec.num_workers} workers, {spec.num_microbatches} microbatches"
    if parsed.svg:
        _write(parsed.svg, draw_svg(result.spans, spec.num_workers, title=title, num_stages=spec.num_stages))
    if parsed.html:
        picture = Picture(title, result.spans, spec.num_workers, waits=waits(spec, result.spans))
        _write(parsed.html, draw_page([picture]))
    if parsed.chrome:
        Path(parsed.chrome).parent.mkdir(parents=True, exist_ok=True)
        write_chrome(parsed.chrome, spec, {0: result.spans})


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _compare(parsed: argparse.Namespace, argv: list[str]) -> int:
    comm = parse_number("--comm", parsed.comm)
    for option in ("workers", "microbatches"):
        if getattr(parsed, option) < 1:
            raise ConfigError(f"--{option} {getattr(parsed, option)}: must be at least 1")
    sizes = {
        key: parse_bytes(f"--memory {key}", text) for key, text in parse_assignments("--memory", parsed.memory).items()
    }
    limit = sizes.pop("limit", None)
    model = (
        _measured(parsed) if parsed.measure else ModelCosts(parsed.workers, [parse_costs(parsed.cost)], _given(sizes))
    )
    if limit is not None and not model.sizes:
        raise ConfigError(
            f"--memory limit={limit:g}: add sizes to compare with, such as activations=64MB; or --measure"
        )
    rows = compare(model, parsed.microbatches, comm=comm, limit=limit, order=parsed.order)
    if parsed.json:
        print(json.dumps([_as_json(row) for row in rows]))
        return 0
    console = Reporter().console
    console.print(table(rows, parsed.workers, parsed.microbatches))
    console.print(verdict(rows, limit), markup=False)
    return 0


def _as_json(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "parameters": dict(row.parameters)}


def _given(sizes: dict[str, float]) -> list[Size]:
    known = [field.name for field in dataclasses.fields(Size) if field.name != "outputs"]
    for key in sizes:
        if key not in known:
            raise ConfigError(f"--memory {key}: known are {', '.join(known)}, limit")
    return [Size(**sizes, outputs=sizes.get("inputs", 0))] if sizes else []


def _measured(parsed: argparse.Namespace) -> ModelCosts:
    """Measure the main job's model, on one microbatch of its batch and one thread."""
    import torch

    from ..demo.gpt import VOCABULARY, gpt_layers, next_byte_loss
    from ..planning.measure import measure

    names = ("width", "depth", "heads", "context", "batch")
    config = TrainOptions(**{name: getattr(parsed, name) for name in names}).gpt
    torch.set_num_threads(1)
    tokens = torch.randint(VOCABULARY, (max(1, parsed.batch // parsed.microbatches), config.context))
    costs = measure(
        [layer() for layer in gpt_layers(config)],
        tokens,
        target=tokens,
        loss_fn=next_byte_loss,
        optimizer=partial(torch.optim.AdamW, lr=TrainOptions.lr),
    )
    return ModelCosts(parsed.workers, [layer.times for layer in costs], [layer.size for layer in costs], by_layer=True)


def _export(parsed: argparse.Namespace, argv: list[str]) -> int:
    spec = make_spec(parsed.schedule, parsed.workers, parsed.microbatches, schedule_options(parsed.set, parsed.window))
    check_all(spec)
    text = export_csv(spec)
    if parsed.file:
        _write(parsed.file, text)
    else:
        print(text, end="")
    return 0


def _schedules(parsed: argparse.Namespace, argv: list[str]) -> int:
    rows: list[dict[str, Any]] = []
    for name, cls in SCHEDULES.items():
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        parameters = {key: defaults[key] for key in parameter_types(cls)}
        summary = (cls.__doc__ or "").strip().split("\n")[0]
        rows.append({"name": name, "summary": summary, "source": cls.source, "parameters": parameters})
    if parsed.json:
        print(json.dumps(rows))
        return 0
    console = Reporter().console
    for row in rows:
        console.print(f"[bold]{row['name']}[/]  {row['summary']}")
        settings = ", ".join(f"{key}={value}" for key, value in row["parameters"].items())
        console.print(f"    {row['source']}" + (f"; --set {settings}" if settings else ""), markup=False)
    return 0
