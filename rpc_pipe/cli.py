"""The command line: `rpc-pipe run | verify | simulate | schedules`.

Modules that need torch are imported where they are used, so that planning answers at once. Exit codes:
0 done, 1 the run failed or differed, 2 wrong input, 130 stopped by the user.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .dependency import ConfigError, PipeError, ScheduleError
from .job import current_job
from .launcher import as_worker, launch
from .options import make_spec, parameter_types, parse_assignments, parse_costs, parse_number
from .report import Reporter
from .schedules import SCHEDULES
from .settings import PipeOptions, TrainOptions, VerifyOptions
from .text import find_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # Options may stand behind the script; what is the script's own stands behind `--`.
    at = argv.index("--") if "--" in argv else len(argv)
    own, rest = argv[:at], argv[at + 1 :]
    parsed = _parser().parse_args(own)
    parsed.rest = rest
    try:
        code: int = parsed.command(parsed, argv)
        return code
    except (ConfigError, ScheduleError) as error:
        Reporter().error(str(error))
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rpc-pipe", description="Pipeline-parallel training whose schedule is a dependency relation."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    defaults = TrainOptions()

    run = commands.add_parser("run", help="train: the built-in GPT on text, or your own script")
    run.add_argument(
        "script", nargs="?", help="your training script, its own arguments behind --; by default a GPT is trained"
    )
    _add_pipe_options(run, defaults)
    run.add_argument("--port", type=int, help="meet at this TCP port instead of at a file")
    for name, kind, text in (
        ("steps", int, "training steps"),
        ("batch", int, "rows of a batch"),
        ("context", int, "bytes of a row"),
        ("width", int, "width of the GPT"),
        ("depth", int, "blocks of the GPT"),
        ("heads", int, "attention heads of a block"),
        ("dropout", float, "dropout"),
        ("lr", float, "peak learning rate of AdamW"),
        ("data", str, "text to train on: a file or folder; by default Python's standard library"),
        ("save", str, "write the weights to this safetensors file"),
        ("trace", str, "write the last steps to this file for Chrome's tracing or Perfetto"),
    ):
        default = getattr(defaults, name)
        shown = "" if default is None else f" ({default})"
        run.add_argument(f"--{name}", type=kind, default=default, help=text + shown)
    run.add_argument(
        "--beat-bigram", action=argparse.BooleanOptionalAction, default=False,
        help="fail unless the held-out loss is below a byte bigram model's",
    )  # fmt: skip
    run.set_defaults(command=_run)

    verify = commands.add_parser("verify", help="compare with one process, bit for bit")
    _add_pipe_options(verify, VerifyOptions())
    verify.add_argument("--steps", type=int, default=VerifyOptions.steps, help="training steps (3)")
    verify.add_argument("--model", choices=("gpt", "conv", "mlp"), default="gpt")
    verify.add_argument("--transport", choices=("rpc", "local"), default="rpc", help="processes or threads")
    verify.add_argument("--rows", type=int, help="rows of a batch (2 M + 1, so that the last is ragged)")
    verify.add_argument("--dropout", type=float, default=VerifyOptions.dropout, help="dropout (0.1)")
    verify.set_defaults(command=_verify)

    simulate = commands.add_parser("simulate", help="check, price and draw a schedule")
    _add_schedule_options(simulate, defaults)
    simulate.add_argument("--cost", default="F=1,B=2,I=1,W=1", help="time by kind (F=1,B=2,I=1,W=1)")
    simulate.add_argument("--comm", default="0", help="time of a payload between two workers (0)")
    simulate.set_defaults(command=_simulate)

    schedules = commands.add_parser("schedules", help="list the schedules")
    schedules.add_argument("--json", action="store_true", help="print JSON")
    schedules.set_defaults(command=_schedules)
    return parser


def _add_schedule_options(parser: argparse.ArgumentParser, defaults: PipeOptions) -> None:
    parser.add_argument("--schedule", default=defaults.schedule, help="name or path/to/file.py:ClassName (1f1b)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="schedule's parameter")
    parser.add_argument("--window", type=int, help="microbatches in flight, where the schedule has a window")
    parser.add_argument("--workers", type=int, default=defaults.workers, help="workers (2)")
    parser.add_argument("--microbatches", type=int, default=defaults.microbatches, help="a step's (8)")
    parser.add_argument("--order", choices=("ready", "fixed"), help="the schedule's own by default")
    parser.add_argument("--json", action="store_true", help="print JSON; human text goes to stderr")


def _add_pipe_options(parser: argparse.ArgumentParser, defaults: PipeOptions) -> None:
    _add_schedule_options(parser, defaults)
    parser.add_argument("--split", help="layers of each stage, such as 3,2,2,3 (even)")
    parser.add_argument("--device", default=defaults.device, help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of all that is random (0)")
    parser.add_argument("--threads", type=int, default=defaults.threads, help="torch threads of a worker (1)")


def _schedule_options(parsed: argparse.Namespace) -> dict[str, str]:
    options = parse_assignments("--set", parsed.set)
    if parsed.window is not None:
        options["window"] = str(parsed.window)
    return options


def _options(cls: type[Any], parsed: argparse.Namespace) -> Any:
    """Fill the settings dataclass `cls` from what was typed."""
    names = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in vars(parsed).items() if name in names}
    values["schedule_options"] = _schedule_options(parsed)
    if parsed.split is not None:
        parts = parsed.split.split(",")
        if not all(part.strip().isdigit() for part in parts):
            raise ConfigError(f"--split {parsed.split}: must be whole numbers with commas, such as 3,2,2,3")
        values["split"] = [int(part) for part in parts]
    return cls(**values)


def _run(parsed: argparse.Namespace, argv: list[str]) -> int:
    options: TrainOptions = _options(TrainOptions, parsed)
    job = current_job()
    if parsed.script is not None:
        if not Path(parsed.script).is_file():
            raise ConfigError(f"{parsed.script}: there is no such file")
        if job is None:
            return launch(argv, options.workers, Reporter(parsed.json), threads=options.threads, port=parsed.port)
        return as_worker(lambda: _run_script(parsed.script, parsed.rest), Reporter(parsed.json))
    if job is None:
        options.spec(options.gpt.num_layers)
        find_text(options.data, options.context)
        return launch(argv, options.workers, Reporter(parsed.json), threads=options.threads, port=parsed.port)

    def work() -> None:
        from .train import train

        train(dataclasses.replace(options, workers=job.num_workers))

    return as_worker(work, Reporter(parsed.json))


def _run_script(script: str, rest: list[str]) -> None:
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _verify(parsed: argparse.Namespace, argv: list[str]) -> int:
    options: VerifyOptions = _options(VerifyOptions, parsed)
    options.spec(sum(options.split) if options.split else 10**9)
    job = current_job()
    if job is None and options.transport == "rpc":
        return launch(argv, options.workers, Reporter(parsed.json), threads=options.threads)

    def work() -> None:
        from .verify import verify

        verify(options)

    return as_worker(work, Reporter(parsed.json))


def _simulate(parsed: argparse.Namespace, argv: list[str]) -> int:
    from .dependency import check_all
    from .simulator import simulate, uniform
    from .timeline import draw

    spec = make_spec(parsed.schedule, parsed.workers, parsed.microbatches, _schedule_options(parsed))
    check_all(spec)
    cost, comm = uniform(parse_costs(parsed.cost)), parse_number("--comm", parsed.comm)
    try:
        result = simulate(spec, cost, comm=comm, order=parsed.order)
    except PipeError as error:
        Reporter().error(str(error))
        return 1
    orders = result.orders()
    report = {
        "schedule": parsed.schedule,
        "parameters": spec.parameters(),
        "workers": spec.num_workers,
        "stages": spec.num_stages,
        "microbatches": spec.num_microbatches,
        "order": result.order,
        "makespan": result.makespan,
        "span": result.span,
        "bubble": result.bubble,
        "busy": list(result.busy),
        "peak_activations": list(result.peak_activations),
        "actions": sum(map(len, orders)),
        "orders": [[str(action) for action in order] for order in orders],
    }
    if parsed.json:
        print(json.dumps(report))
        return 0
    reporter = Reporter()
    reporter.console.print(draw(result.spans, spec.num_workers, width=reporter.console.width))
    reporter.console.print(
        f"{parsed.schedule}: makespan {result.makespan:g}, span {result.span:g}, bubble {result.bubble:.1%}, "
        f"peak activations {', '.join(map(str, result.peak_activations))}"
    )
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
