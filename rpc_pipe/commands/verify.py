"""`rpc-pipe verify`: compare a pipeline with one process, bit for bit."""

from typing import Any

from ..dependency import ConfigError
from ..launching.job import current_job
from ..launching.launcher import Launcher
from ..launching.report import Reporter
from ..launching.worker_main import as_worker
from ..verifying.verify_options import BUILT_IN, CONTEXT, VerifyOptions
from .options import MAKE, PIPELINE, Parser, filled, refuse_typed, set_transport
from .readers import fraction, number, whole, wholes
from .run import follow_plan, how, refuse_idle


def add(commands: Any) -> None:
    """Add `verify` to the command line."""
    parser: Parser = commands.add_parser("verify", help="compare with one process, bit for bit")
    known = f"gpt, conv, mlp, or {MAKE} ({VerifyOptions.model})"
    parser.add_argument("model", nargs="?", metavar="FILE.py:make", help=known)
    parser.take(*(name for name in PIPELINE if name != "compile"))  # which rounds otherwise
    parser.add_argument("--plan", metavar="FILE", help="verify what rpc-pipe plan wrote")
    parser.add_argument("--steps", type=whole(1, 10**6), help=f"training steps ({VerifyOptions.steps})")
    parser.add_argument("--blocks", action="append", help="names of lists of blocks, or of blocks, with commas")
    parser.add_argument("--list-blocks", action="store_true", help="only print the blocks, and what each cut passes")
    parser.add_argument("--rows", type=whole(1, 10**6), help="rows of a batch (2 M + 1, so that the last is ragged)")
    parser.add_argument("--lengths", type=wholes, metavar="L,L,...", help="tokens a row of each microbatch of gpt (16)")
    parser.add_argument("--dropout", type=fraction, help=f"dropout ({VerifyOptions.dropout})")
    parser.add_argument("--max-grad-norm", type=number, help="clip gradients to this norm, and compare the norms")
    parser.add_argument("--deferred-batch-norm", action="store_true", help="running statistics are of whole batches")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    """Train by a pipeline and in one process, and compare; return the exit code."""
    typed = _checked({name: value for name, value in follow_plan(typed).items() if name != "plan"})
    set_transport(typed)
    started = how(typed)
    options = filled(VerifyOptions, {**typed, "transport": started.transport})
    job = current_job()
    refuse_idle(typed, job)
    if job is not None and options.transport == "local":
        refuse_typed({"transport": "local"}, ["transport"], "runs in one process, and this is one of several")
    options.spec(sum(options.split) if options.split else 10**9)
    reporter = Reporter("json" in typed)
    if "list_blocks" in typed:
        from ..verifying.block_report import list_blocks

        return as_worker(lambda: list_blocks(options), reporter)
    if job is None and options.transport != "local":
        return Launcher(argv, options.num_workers, reporter, started).run()

    def work() -> None:
        from ..verifying.proof import prove

        prove(options)

    return as_worker(work, reporter)


def _checked(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the typed options with the names of blocks apart.

    Raises:
        ConfigError: the model is unknown, or an option cannot be combined with it.
    """
    model = typed.get("model", VerifyOptions.model)
    if model != "gpt" or max(typed.get("lengths", [1])) > CONTEXT:
        refuse_typed(typed, ["lengths"], f"is of gpt, whose rows have at most {CONTEXT} tokens")
    if model in BUILT_IN:
        refuse_typed(typed, ["blocks", "list_blocks"], "is of a model of yours; name it, FILE.py:make")
    elif ".py:" not in model:
        raise ConfigError(f"{model}: must be {', '.join(BUILT_IN)}, or path/to/file.py:make")
    else:
        refuse_typed(typed, ["rows", "dropout"], f"is of the built-in models; {model} says it itself")
    if "slices" in typed:
        refuse_typed(typed, ["dropout"], "slices draw other numbers than whole sequences; leave one of the two out")
    blocks = {"blocks": ",".join(typed["blocks"]).split(",")} if "blocks" in typed else {}
    return {**typed, **blocks}
