"""`rpc-pipe run`: train the built-in GPT, or run a script in every worker.

A typed option overrides the script's (`launching.job`); an option that cannot apply is refused.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..demo.settings import DemoTraining, GPTConfig
from ..dependency import ConfigError
from ..launching import launcher_link as link
from ..launching.job import TRANSPORT, TRANSPORTS, Job, current_job
from ..launching.report import Reporter
from ..launching.worker_main import as_worker
from ..planning.pipe_options import PipeOptions, workers_of
from ..planning.specs import make_spec
from ..tracing.run_summary import FILES, result_of

from .options import (  # isort: skip
    CHECKPOINTS, MAKE, MEMBERS, PIPELINE, Parser, refuse_device, refuse_typed, refuse_workers, schedule_options,
    set_transport, try_files, typed_checkpoints,
)  # fmt: skip
from .readers import fraction, indices, memory, number, span, whole

if TYPE_CHECKING:
    from ..launching.attempt import How

#: environment variable of workers: the file of the plan that --plan auto has made
_AUTO_PLAN = "RPC_PIPE_AUTO_PLAN"
#: options of the built-in training only
_GPT: dict[str, tuple[Callable[[str], Any], str]] = {
    "steps": (whole(1), "training steps"),
    "batch": (whole(1, 2**16), "rows of a batch"),
    "context": (whole(1, 2**16), "bytes of a row"),
    "width": (whole(1, 2**14), "width of the GPT"),
    "depth": (whole(1, 2**10), "blocks of the GPT"),
    "heads": (whole(1, 2**14), "attention heads of a block"),
    "dropout": (fraction, "dropout"),
    "lr": (number, "peak learning rate of AdamW"),
    "data": (str, "text to train on: a file or folder; by default Python's standard library"),
}


def add(commands: Any) -> None:
    """Add `run` to the command line."""
    parser: Parser = commands.add_parser("run", help="train: the built-in GPT on text, or your own script")
    parser.add_argument("script", nargs="?", help="your script, its own arguments after -- (a built-in GPT is trained)")
    parser.take(*PIPELINE)
    parser.add_argument("--model", metavar="FILE.py:make", help=f"train a model of yours on its batch: {MAKE}")
    parser.add_argument("--plan", metavar="FILE|auto", help="what rpc-pipe plan wrote; auto: plan for --model")
    parser.add_argument("--memory", type=memory, metavar="BYTES", help="of each worker, for --plan auto (no limit)")
    parser.add_argument("--save", metavar="FILE", help="write the weights to this safetensors file")
    parser.add_argument("--trace", metavar="FILE", help="write the last steps for Chrome's tracing or Perfetto")
    parser.add_argument("--html", metavar="FILE", help="write the last step, planned and actual, as a page to zoom in")
    parser.add_argument("--log-workers", type=indices, metavar="0,...", help="show what these workers print (all)")
    parser.add_argument("--max-restarts", type=whole(0), metavar="N", help="restart up to N times after failures (0)")
    gone = "go on without workers that die: live replicas of their stages do their work (docs/elastic.md)"
    gone += "; MIN:MAX: in time with other numbers of stages and replicas, for so many workers"
    parser.add_argument("--elastic", type=span, metavar="[MIN:MAX]", help=gone)
    back = "with --elastic: start a process in the place of a worker that has died; it takes part after a step"
    parser.add_argument("--rejoin", action="store_true", help=back)
    hosts = "with --elastic: hosts of the job; type the same line on each (1); without --elastic see torchrun"
    parser.add_argument("--hosts", type=whole(1), metavar="N", help=hosts)
    parser.add_argument("--meet", metavar="HOST:PORT", help="with --hosts: an address of the first host, free there")
    kept = parser.add_argument_group("checkpoints")
    kept.add_argument("--checkpoint-every", type=whole(1), metavar="STEPS", help="write one every so many steps")
    kept.add_argument("--checkpoint-folder", metavar="FOLDER", help="their folder, for all workers (checkpoints)")
    kept.add_argument("--checkpoint-keep", type=whole(1), metavar="N", help="keep only the N newest (all)")
    kept.add_argument("--resume", metavar="auto|FOLDER", help="from the newest; auto: if --checkpoint-folder has one")
    gpt = parser.add_argument_group("the built-in GPT")
    for name, (kind, text) in _GPT.items():
        default = {**vars(GPTConfig), **vars(DemoTraining)}[name]
        gpt.add_argument(f"--{name}", type=kind, help=text + ("" if default is None else f" ({default})"))
    beaten = "fail unless the held-out loss is below a byte bigram model's"
    gpt.add_argument("--beat-bigram", action=argparse.BooleanOptionalAction, help=beaten)
    parser.epilog = "With a script of yours, what is not typed is as the script says."


def command(typed: dict[str, Any], argv: list[str]) -> int:
    """Train or run the script; return the exit code."""
    set_transport(typed)
    job = current_job()
    typed = _with_model(follow_plan(_planned(typed, job)))
    refuse_idle(typed, job)
    if job is None or job.worker == 0:
        try_files(typed, FILES)
        if typed.keys() & CHECKPOINTS:
            from ..checkpoints.resume_options import try_checkpoints

            try_checkpoints(*typed_checkpoints(typed))
    return start_script(typed, argv, job, "json" in typed)


def _planned(typed: dict[str, Any], job: Job | None) -> dict[str, Any]:
    """Return the typed options with the file of the kept plan in place of --plan auto.

    Raises:
        ConfigError: there is nothing to plan for, or another launcher has started this job.
    """
    if typed.get("plan") != "auto":
        refuse_typed(typed, ["memory"], "is for --plan auto; leave it out")
        return typed
    if job is None or _AUTO_PLAN not in os.environ:
        before = "rpc-pipe plan FILE.py:make --output plan.json, and --plan plan.json"
        if "model" not in typed:
            refuse_typed(typed, ["plan"], f"needs --model FILE.py:make, which is measured; for a script: {before}")
        if job is not None:
            refuse_typed(typed, ["plan"], f"this job has been started already; before it: {before}")
        from .plan import kept_plan

        names, reporter = ("model", "workers", "memory", "threads", "device"), Reporter("json" in typed)
        path, line = kept_plan({name: typed[name] for name in names if name in typed}, reporter)
        reporter.text(line)
        os.environ[_AUTO_PLAN] = str(path)
    return {**{name: value for name, value in typed.items() if name != "memory"}, "plan": os.environ[_AUTO_PLAN]}


def _with_model(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the typed options with the script that trains --model, or the built-in GPT, unless a script is named."""
    folder = Path(__file__).parent
    if "model" in typed:
        model = typed["model"]
        if "script" in typed:
            refuse_typed(typed, ["model"], f"{typed['script']} says what is trained; leave one of the two out")
        if ".py:" not in model:
            refuse_typed(typed, ["model"], f"must be path/to/file.py:make, {MAKE}")
        script, first, names = folder / "own_train.py", [model], ["steps", "lr"]
        of_gpt = [name for name in (*_GPT, "beat_bigram") if name not in names]
        refuse_typed(typed, of_gpt, f"is an option of the built-in GPT, and {model} says what is trained; leave it out")
    elif "script" not in typed:
        script, first = folder.parent / "demo" / "train.py", ["--beat-bigram"] * typed.pop("beat_bigram", 0)
        names = [*_GPT]
    else:
        return typed
    arguments = [*first, *(f"--{name}={typed[name]}" for name in (*names, "seed") if name in typed)]
    kept = {name: each for name, each in typed.items() if name not in ("model", *names)}
    return {**kept, "script": str(script), "arguments": arguments}


def how(typed: Mapping[str, Any]) -> How:
    """Return the options of starting processes."""
    from ..launching.attempt import How  # a worker starts none

    transport = os.environ.get(TRANSPORT, TRANSPORTS[0])
    shown, workers = typed.get("log_workers"), typed.get("workers", PipeOptions.num_workers)
    if beyond := [worker for worker in shown or () if worker >= workers]:
        refuse_typed({"log_workers": beyond}, ["log_workers"], f"there are workers 0 to {workers - 1}")
    least, most = map(int, typed["elastic"].split(":")) if typed.get("elastic", True) is not True else (2, 2)
    if most > workers:
        advice = f"take {min(least, workers)}:{workers}"
        refuse_typed(typed, ["elastic"], f"{most} is more than the {workers} of --workers; {advice}")
    hosts = typed.get("hosts", 1)
    if hosts > workers:
        refuse_typed(typed, ["hosts"], f"there are {workers} workers, and each host has one at least")
    threads, port, restarts = typed.get("threads"), typed.get("port"), typed.get("max_restarts", 0)
    return How(
        threads, port, transport, restarts, log_workers=shown, meet=typed.get("meet", ""), hosts=hosts,
        elastic="elastic" in typed, rejoins="rejoin" in typed, summarise=result_of,
    )  # fmt: skip


def follow_plan(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the typed options with the options that --plan decides.

    Raises:
        ConfigError: the file is no plan, or an option that it decides was typed as well.
    """
    if "plan" not in typed:
        return typed
    from ..planning.plan import read_plan

    path = typed["plan"]
    plan = read_plan(path)
    options = {key: str(value) for key, value in plan.schedule_options.items() if value is not None}
    said: dict[str, Any] = {"slices": options.pop("slices")} if "slices" in options else {}  # which may have commas
    said |= {"schedule": path if plan.program else plan.schedule, "set": options, **plan.sharing}
    said |= {"microbatches": plan.num_microbatches, "split": list(plan.cut)}
    said |= {} if plan.microbatch_order == "given" else {"microbatch_order": plan.microbatch_order}
    names = (*said, *MEMBERS, "window", "replicas", "slices")
    refuse_typed(typed, names, f"--plan {path} says it; leave one of the two out")
    if (workers := plan.num_workers) and typed.get("workers", workers) != workers:
        refuse_typed(typed, ["workers"], f"the plan in {path} is for {workers} workers")
    said |= {"workers": workers} if workers else {}
    return {**typed, **said, "plan": str(Path(path).resolve())}  # the pipeline reads it again


def refuse_idle(typed: dict[str, Any], job: Job | None) -> None:
    """Refuse options that have no effect in a job that another launcher has started."""
    if os.environ.get(TRANSPORT) == "local":
        refuse_typed(typed, ["port"], "has no effect with --transport local; leave it out")
    if "elastic" in typed and os.environ.get(TRANSPORT, TRANSPORTS[0]) != "zmq":
        needs = "needs --transport zmq, as torch RPC begins once in the life of a process, and replicas of at least 2"
        refuse_typed(typed, ["elastic"], needs)
    if "elastic" not in typed:
        refuse_typed(typed, ["rejoin"], "needs --elastic: without it the job ends when a worker dies")
        refuse_typed(typed, ["hosts", "meet"], "needs --elastic; without it torchrun starts a job on several hosts")
    if "hosts" in typed:
        if typed.get("elastic") is not True:
            refuse_typed(typed, ["elastic"], "the shape stays on several hosts; take --elastic alone")
        refuse_typed(typed, ["port"], "several hosts meet where --meet says; leave it out")
    if ("hosts" in typed) != ("meet" in typed):
        refuse_typed(typed, ["hosts", "meet"], "type both: --hosts N --meet HOST:PORT")
    if job is None or link.present():
        return
    refuse_typed(typed, ["elastic"], "torchrun ends all workers when one dies; start it by rpc-pipe run (--hosts)")
    refuse_typed(typed, ["port"], "this job meets where torchrun says; leave it out")
    refuse_typed(typed, ["log_workers"], "torchrun shows what workers print; see its --tee and --local-ranks-filter")
    refuse_typed(typed, ["max_restarts"], "type it before the script, as torchrun's own")
    refuse_workers(typed, job)


def start_script(typed: dict[str, Any], argv: list[str], job: Job | None, as_json: bool) -> int:
    """Start workers, or as one of them run the script; return the exit code."""
    script = typed["script"]
    if not Path(script).is_file():
        if Path(script).is_dir():
            raise ConfigError(f"{script}: is a folder; name the script in it")
        beside = [str(path) for path in sorted(Path(script).parent.glob("*.py"))]
        is_make = Path(script.partition(":")[0]).is_file()
        near = [f"--model {script}"] if is_make else difflib.get_close_matches(script, beside, n=1)
        raise ConfigError(f"{script}: there is no such file{f'; did you mean {near[0]}?' if near else ''}")
    of_gpt = f"is an option of the built-in GPT, but {script} runs; put the script's own options after --"
    refuse_typed(typed, (*_GPT, "beat_bigram"), of_gpt)
    options, reporter = schedule_options(typed), Reporter(as_json)
    if job is None:
        refuse_device(typed.get("device", "cpu"))
        workers = typed.get("workers", PipeOptions.num_workers)
        of_most = {name: typed[name] for name in ("replicas", "slices") if name in typed}
        known: Any = options if "schedule" in typed else of_most  # other options are the script's
        microbatches = typed.get("microbatches", typed.get("replicas", 1))
        make_spec(typed.get("schedule", "1f1b"), workers_of(workers, typed.get("members", 1)), microbatches, known)
        if "meet" in typed:
            from ..launching.host_launcher import of_hosts as launcher  # few jobs have several hosts
        else:
            from ..launching.launcher import Launcher as launcher
        return launcher(argv, workers, reporter, how(typed)).run()

    def work() -> None:
        from .script import run_script

        rest = argv[argv.index("--") + 1 :] if "--" in argv else []
        run_script(script, typed.get("arguments", rest), typed, options, job)

    return as_worker(work, reporter)
