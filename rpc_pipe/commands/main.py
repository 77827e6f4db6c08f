"""The command line: `rpc-pipe run | verify | watch | simulate | compare | export | schedules`.

Modules that need torch are imported where they are used, so that planning answers at once. Exit codes:
0 done, 1 the run failed or differed, 2 wrong input, 130 stopped by the user.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..demo.settings import TrainOptions
from ..demo.text import find_text
from ..dependency import ConfigError, ScheduleError
from ..dispatch import command as watching
from ..launching.job import current_job
from ..launching.launcher import as_worker, launch
from ..launching.report import Reporter
from ..planning.options import PipeOptions, schedule_options
from . import plan as planning
from .settings import VerifyOptions


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
    except KeyboardInterrupt:  # before there was anything to stop in good order
        return 130
    except BrokenPipeError:  # whoever read what we print, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
        ("html", str, "write the last step, planned and actual, as a page to zoom and hover in"),
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

    watching.add_command(commands)
    planning.add_commands(commands, _add_schedule_options)
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


def _options(cls: type[Any], parsed: argparse.Namespace) -> Any:
    """Fill the settings dataclass `cls` from what was typed."""
    names = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in vars(parsed).items() if name in names}
    values["schedule_options"] = schedule_options(parsed.set, parsed.window)
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
        from ..demo.train import train

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
