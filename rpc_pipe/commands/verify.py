"""`rpc-pipe verify`: compare a pipeline with one process, bit for bit."""

from __future__ import annotations

from typing import Any

from ..demo.settings import VerifyOptions
from ..dependency import ConfigError
from ..launching.job import current_job
from ..launching.launcher import as_worker, launch
from ..launching.report import Reporter
from .options import Parser, add_pipeline, filled, fraction, set_transport, whole
from .run import how, refuse_idle


def add(commands: Any) -> None:
    """Add `verify` to the command line."""
    parser: Parser = commands.add_parser("verify", help="compare with one process, bit for bit")
    add_pipeline(parser)
    parser.add_argument("--steps", type=whole(1), help=f"training steps ({VerifyOptions.steps})")
    parser.add_argument("--model", choices=("gpt", "conv", "mlp"), help=f"what is trained ({VerifyOptions.model})")
    parser.add_argument("--rows", type=whole(1), help="rows of a batch (2 M + 1, so that the last is ragged)")
    parser.add_argument("--dropout", type=fraction, help=f"dropout ({VerifyOptions.dropout})")
    parser.set_defaults(command=verify)


def verify(typed: dict[str, Any], argv: list[str]) -> int:
    """Train piped and in one process, compare; return the exit code."""
    set_transport(typed)
    started = how(typed)
    options = filled(VerifyOptions, {**typed, "transport": started.transport})
    job = current_job()
    refuse_idle(typed, job)
    if job is not None and options.transport == "local":
        raise ConfigError("--transport local: runs in one process, but this is one of several; leave it out")
    options.spec(sum(options.split) if options.split else 10**9)
    reporter = Reporter("json" in typed)
    if job is None and options.transport != "local":
        return launch(argv, options.workers, reporter, started)

    def work() -> None:
        from ..demo.proof import prove

        prove(options)

    return as_worker(work, reporter)
