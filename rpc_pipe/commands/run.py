"""`rpc-pipe run`: train the built-in GPT, or run a script in every worker.

What is typed wins over what a script says for its pipelines (`launching.overrides`); what cannot apply is refused.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.options import try_checkpoints
from ..demo.settings import GPTConfig, Training
from ..dependency import ConfigError
from ..launching import launcher_link as link
from ..launching.job import TRANSPORT, TRANSPORTS, Job, current_job
from ..launching.report import Reporter
from ..launching.worker_main import as_worker
from ..planning.specs import PipeOptions, make_spec
from ..tracing.run_summary import FILES
from .files import try_files
from .options import (
    Parser,
    add_pipeline,
    fraction,
    number,
    schedule_options,
    set_transport,
    typed_checkpoints,
    whole,
)

if TYPE_CHECKING:
    from ..launching.launcher import How

#: options of the built-in training only
_GPT: dict[str, tuple[Callable[[str], Any], str]] = {
    "steps": (whole(1), "training steps"),
    "batch": (whole(1), "rows of a batch"),
    "context": (whole(1), "bytes of a row"),
    "width": (whole(1), "width of the GPT"),
    "depth": (whole(1), "blocks of the GPT"),
    "heads": (whole(1), "attention heads of a block"),
    "dropout": (fraction, "dropout"),
    "lr": (number, "peak learning rate of AdamW"),
    "data": (str, "text to train on: a file or folder; by default Python's standard library"),
}

#: options whose default a script overrides
_OF_SCRIPT = ("schedule", "replicas", "slices", "microbatches", "order", "split", "device", "seed", "threads", "nan")


def add(commands: Any) -> None:
    """Add `run` to the command line."""
    parser: Parser = commands.add_parser("run", help="train: the built-in GPT on text, or your own script")
    parser.add_argument(
        "script",
        nargs="?",
        help="your training script, with its own arguments after --; without one a built-in GPT is trained",
    )
    add_pipeline(parser)
    parser.add_argument(
        "--model", metavar="FILE.py:make",
        help="train a model of yours on a batch: a function that returns model, batch or model, batch, loss_fn",
    )  # fmt: skip
    parser.add_argument(
        "--plan", metavar="FILE|auto",
        help="what rpc-pipe plan wrote: schedule, workers, cut and so on; auto: plan for --model, again if a run shows "
        "a better one",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="BYTES", help="memory of each worker, for --plan auto, such as 8GB (no limit)"
    )
    parser.add_argument("--save", metavar="FILE", help="write the weights to this safetensors file")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the last steps to this file for Chrome's tracing or Perfetto"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write the last step, planned and actual, as a page to zoom and hover in"
    )
    parser.add_argument(
        "--max-restarts", type=whole(0), metavar="N",
        help="after a failure restart up to N times, from the newest sound checkpoint that this run has written (0)",
    )  # fmt: skip
    _add_checkpoints(parser)
    built_in = _add_built_in(parser)
    parser.set_defaults(command=run)

    def prepare(words: list[str]) -> None:
        if any(word == "--model" or word.endswith(".py") for word in words):
            _leave_to_script(parser, built_in)

    parser.prepare = prepare  # type: ignore[method-assign]


def _add_checkpoints(parser: Parser) -> None:
    kept = parser.add_argument_group("checkpoints")
    kept.add_argument(
        "--checkpoint-every",
        type=whole(1),
        metavar="STEPS",
        help="write a checkpoint every so many steps, and when stopped",
    )
    kept.add_argument(
        "--checkpoint-folder", metavar="FOLDER", help="folder for them, which all workers must see (checkpoints)"
    )
    kept.add_argument("--checkpoint-keep", type=whole(1), metavar="N", help="keep only the N newest (all)")
    kept.add_argument(
        "--resume",
        metavar="auto|FOLDER",
        help="continue from the newest sound one in --checkpoint-folder, if there is one, or the newest in FOLDER",
    )


def _add_built_in(parser: Parser) -> Sequence[argparse.Action]:
    gpt = parser.add_argument_group("the built-in GPT")
    for name, (kind, text) in _GPT.items():
        default = {**vars(GPTConfig), **vars(Training)}[name]
        gpt.add_argument(f"--{name}", type=kind, help=text + ("" if default is None else f" ({default})"))
    gpt.add_argument(
        "--beat-bigram", action=argparse.BooleanOptionalAction,
        help="fail unless the held-out loss is below a byte bigram model's",
    )  # fmt: skip
    return gpt._group_actions


def _leave_to_script(parser: Parser, built_in: Sequence[argparse.Action]) -> None:
    """Take from the help what a script decides: the options of the built-in GPT, and defaults of its pipeline."""
    for action in built_in:
        action.help = argparse.SUPPRESS
    for action in parser._actions:
        if action.dest in _OF_SCRIPT and action.help:
            action.help = re.sub(r" \([^()]*\)$", "", action.help)
    parser.epilog = "What is not typed is as the script says."


def refuse_unknown(script: str, unknown: Sequence[str], near: str) -> None:
    """Return the error about unknown options: a script's own follow `--`; ours that is most similar is `near`."""
    if unknown:
        raise ConfigError(
            f"{' '.join(unknown)}: not an option of rpc-pipe run; {near}put the script's own options after --: "
            f"rpc-pipe run {script} -- {' '.join(unknown)}"
        )


def run(typed: dict[str, Any], argv: list[str]) -> int:
    """Train or run the script; return the exit code."""
    set_transport(typed)
    job = current_job()
    typed, argv = _planned(typed, argv, job)
    typed = _with_model(follow_plan(typed))
    refuse_idle(typed, job)
    if job is None or job.worker == 0:
        try_files(typed, FILES)
        try_checkpoints(*typed_checkpoints(typed))
    return _run_script(typed, argv, job)


def _planned(typed: dict[str, Any], argv: list[str], job: Job | None) -> tuple[dict[str, Any], list[str]]:
    """Return the typed options with the file of the kept plan in place of --plan auto.

    Raises:
        ConfigError: there is nothing to plan for, or others have started this job.
    """
    if typed.get("plan") != "auto":
        if "memory" in typed:
            raise ConfigError(f"--memory {typed['memory']}: is for --plan auto; leave it out")
        return typed, argv
    if "model" not in typed:
        raise ConfigError(
            "--plan auto: needs --model FILE.py:make, which is measured; for a script: rpc-pipe plan FILE.py:make "
            "--auto --output plan.json, and --plan plan.json"
        )
    if job is not None:
        raise ConfigError(
            "--plan auto: this job has been started already; before it: rpc-pipe plan --auto --output plan.json"
        )
    from .plan import AUTO_SECONDS, keep_up

    names = ("model", "workers", "memory", "threads", "device")
    reporter = Reporter("json" in typed)
    path, line = keep_up({name: typed[name] for name in names if name in typed}, AUTO_SECONDS, reporter)
    reporter.text(line)
    rest = {name: value for name, value in typed.items() if name not in ("memory", "plan")}
    for option in ("--memory", "--plan"):
        argv = _without(argv, option)
    return {**rest, "plan": str(path)}, [argv[0], "--plan", str(path), *argv[1:]]


def _without(argv: Sequence[str], option: str) -> list[str]:
    """Return the arguments without an option and its value."""
    end = argv.index("--") if "--" in argv else len(argv)
    for at, word in enumerate(argv[:end]):
        if word == option or word.startswith(f"{option}="):
            return [*argv[:at], *argv[at + (2 if word == option else 1) :]]
    return list(argv)


def _with_model(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the typed options with the script that trains --model, or the built-in GPT, unless a script is named."""
    folder = Path(__file__).parent
    if "model" in typed:
        model = typed["model"]
        if "script" in typed:
            raise ConfigError(f"--model {model}: {typed['script']} says what is trained; leave one of the two out")
        if ".py:" not in model:
            raise ConfigError(f"--model {model}: must be path/to/file.py:make, a function that returns model, batch")
        script, first, names = folder / "own_train.py", [model], ["steps", "lr"]
    elif "script" not in typed:
        script, first, names = (
            folder.parent / "demo" / "train.py",
            ["--beat-bigram"] * typed.pop("beat_bigram", 0),
            [*_GPT],
        )
    else:
        return typed
    arguments = [*first, *(f"--{name}={typed[name]}" for name in (*names, "seed") if name in typed)]
    return {
        **{name: each for name, each in typed.items() if name not in ("model", *names)},
        "script": str(script),
        "arguments": arguments,
    }


def how(typed: Mapping[str, Any]) -> How:
    """Return the options of starting processes."""
    from ..launching.launcher import How  # a worker starts none

    transport = os.environ.get(TRANSPORT, TRANSPORTS[0])
    return How(typed.get("threads"), typed.get("port"), transport, typed.get("max_restarts", 0))


def _start(argv: list[str], workers: int, reporter: Reporter, typed: Mapping[str, Any]) -> int:
    from ..launching.launcher import launch

    return launch(argv, workers, reporter, how(typed))


def follow_plan(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the typed options with those that --plan decides.

    Raises:
        ConfigError: the file is no plan, or something that it says was typed as well.
    """
    if "plan" not in typed:
        return typed
    from ..planning.plan import read_plan
    from .auto import let_note

    path = typed["plan"]
    plan = read_plan(path)
    let_note(path)
    options = {key: value for key, value in plan.schedule_options.items() if value is not None}
    said: dict[str, Any] = {
        "schedule": path if plan.program else plan.schedule,
        **({"slices": str(options.pop("slices"))} if "slices" in options else {}),  # which may have commas
        "set": [f"{key}={value}" for key, value in options.items()],
        "microbatches": plan.num_microbatches,
        "split": list(plan.cut),
    }
    for name in (*said, "window"):
        if name in typed:
            raise ConfigError(f"--{name}: --plan {path} says it; leave one of the two out")
    if plan.num_workers and typed.get("workers", plan.num_workers) != plan.num_workers:
        raise ConfigError(f"--workers {typed['workers']}: the plan in {path} is for {plan.num_workers} workers")
    if plan.num_workers:
        said["workers"] = plan.num_workers
    return {**typed, **said, "plan": str(Path(path).resolve())}  # the pipeline reads it again


def refuse_idle(typed: dict[str, Any], job: Job | None) -> None:
    """Refuse options that have no effect in a job that another launcher has started."""
    if "port" in typed and os.environ.get(TRANSPORT) == "local":
        raise ConfigError(f"--port {typed['port']}: has no effect with --transport local; leave it out")
    if job is None or link.present():
        return
    if "port" in typed:
        raise ConfigError(f"--port {typed['port']}: this job meets where torchrun says; leave it out")
    if "max_restarts" in typed:
        raise ConfigError(f"--max-restarts {typed['max_restarts']}: type it before the script, as torchrun's own")
    if typed.get("workers", job.num_workers) != job.num_workers:
        raise ConfigError(f"--workers {typed['workers']}: this job has {job.num_workers} workers; leave it out")


def _refuse_device(device: str) -> None:
    """Refuse a device that this machine does not have, before the slow start of workers."""
    if device != "cpu":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(device.partition(":")[2] or 0) >= count:
            raise ConfigError(f"device {device!r}: this machine has {count} CUDA devices; cpu always works")


def _run_script(typed: dict[str, Any], argv: list[str], job: Job | None) -> int:
    script = typed["script"]
    if not Path(script).is_file():
        if Path(script).is_dir():
            raise ConfigError(f"{script}: is a folder; name the script in it")
        beside = [str(path) for path in sorted(Path(script).parent.glob("*.py"))]
        near = difflib.get_close_matches(script, beside, n=1)
        raise ConfigError(f"{script}: there is no such file{f'; did you mean {near[0]}?' if near else ''}")
    for name in (*_GPT, "beat_bigram"):
        if name in typed:
            raise ConfigError(
                f"--{name.replace('_', '-')}: is an option of the built-in GPT, but {script} runs; "
                "put the script's own options after --"
            )
    options = schedule_options(typed)
    reporter = Reporter("json" in typed)
    if job is None:
        _refuse_device(typed.get("device", "cpu"))
        workers = typed.get("workers", PipeOptions.workers)
        of_most = {name: typed[name] for name in ("replicas", "slices") if name in typed}
        known: Any = options if "schedule" in typed else of_most  # others are the script's
        microbatches = typed.get("microbatches", typed.get("replicas", 1))
        make_spec(typed.get("schedule", "1f1b"), workers, microbatches, known)
        return _start(argv, workers, reporter, typed)

    def work() -> None:
        from .script import run_script

        rest = argv[argv.index("--") + 1 :] if "--" in argv else []
        rest = typed.get("arguments", rest)
        run_script(script, rest, typed, options, job)

    return as_worker(work, reporter)
