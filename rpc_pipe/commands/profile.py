"""`rpc-pipe profile`: measure a model block by block, and keep what was measured in a file that can be edited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from ..dependency import ConfigError
from ..drawing.plans import profile_table
from ..launching.report import Reporter
from ..planning.profile import Profile, as_json, from_json
from .files import try_files, write
from .options import Parser, add_json, whole

#: where profiles are kept, beside what they are of
_FOLDER = ".rpc_pipe"
OPTIMIZERS = ("adamw", "sgd", "momentum")


def add(commands: Any) -> None:
    """Add `profile` to the command line."""
    parser: Parser = commands.add_parser("profile", help="measure a model block by block")
    add_measuring(parser)
    parser.add_argument("--rows", type=_rows, help="rows of a microbatch, several with commas (those of the batch)")
    add_json(parser)
    parser.set_defaults(command=_profile)


def add_measuring(parser: Parser) -> None:
    """Add what is measured, and how."""
    parser.add_argument(
        "model", nargs="?", help="path/to/file.py:make, a function that returns model, batch or model, batch, loss_fn"
    )
    parser.add_argument(
        "--profile", metavar="FILE", help="where what was measured is kept and read (.rpc_pipe/, by model)"
    )
    parser.add_argument("--again", action="store_true", help="measure even if that was done before")
    parser.add_argument("--estimate", action="store_true", help="count operations instead of running the model")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="what keeps state and updates (adamw)")
    parser.add_argument("--repeats", type=whole(1), help="how often each block is timed (5)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--threads", type=whole(1), help="torch threads of a worker (1)")


def _profile(typed: dict[str, Any], argv: list[str]) -> int:
    reporter = Reporter("json" in typed)
    profile, path = find_profile(typed, typed.get("rows"), reporter)
    if "json" in typed:
        print(json.dumps(as_json(profile)))
        return 0
    rows = max(profile.measured)
    reporter.console.print(profile_table(profile, rows))
    reporter.console.print(f"kept in {path}, which may be edited", markup=False)
    return 0


def find_profile(
    typed: dict[str, Any], rows: Sequence[int] | None, reporter: Reporter, *, at_least: int = 1
) -> tuple[Profile, Path]:
    """Return the profile that was asked for, from its file or measured, and its file.

    Args:
        rows: of microbatches; None: those of the batch.
        at_least: how many blocks are wanted; with fewer, the parts of blocks are looked at.

    Raises:
        ConfigError: there is neither a model nor a profile.
    """
    given = Path(typed["profile"]) if "profile" in typed else None
    if "model" not in typed:
        if given is None:
            raise ConfigError("profile: needs path/to/file.py:make, a function that returns model, batch")
        return read_profile(given), given
    import torch

    from ..planning.profiling import load, profile_model, rows_of, signature

    torch.set_num_threads(typed.get("threads", 1))
    if given is not None:
        try_files(typed, ["profile"])
    made = load(typed["model"])
    wanted = sorted({min(count, 10**6) for count in rows or [rows_of(made.batch)]})
    settings = {
        "device": typed.get("device", "cpu"),
        "optimizer": typed.get("optimizer", "adamw"),
        "estimate": "estimate" in typed,
    }
    name = signature(made, *settings.values(), typed.get("threads", 1))
    path = given or Path(typed["model"].rpartition(":")[0]).resolve().parent / _FOLDER / f"profile-{name}.json"
    if path.exists() and path.stat().st_size and "again" not in typed:
        known = read_profile(path)
        if known.signature == name and set(wanted) <= set(known.measured) and known.num_blocks >= at_least:
            return known, path
        wanted = sorted({*wanted, *known.measured}) if known.signature == name else wanted
    with progress(reporter) as bar:
        task = bar.add_task("measuring", total=1.0)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done / total)

        profile = profile_model(made, wanted, repeats=typed.get("repeats", 5), at_least=at_least, tell=tell, **settings)
    profile = Profile(
        profile.measured, profile.per_stage, profile.ties, profile.model, name, profile.device, profile.batch_rows
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(path), json.dumps(as_json(profile), indent=1))
    except OSError as error:
        raise ConfigError(f"--profile {path}: cannot be written: {error.strerror}") from error
    return profile, path


def read_profile(path: Path) -> Profile:
    """Read a profile from its file.

    Raises:
        ConfigError: there is none, or it is none.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--profile {path}: cannot be read: {error}") from None
    return from_json(told, f"--profile {path}")


def progress(reporter: Reporter) -> Progress:
    """Return a bar that leaves nothing behind; where nobody looks at a terminal it is not drawn."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    return Progress(*columns, console=reporter.console, transient=True, disable=not reporter.console.is_terminal)


def _rows(text: str) -> list[int]:
    read = whole(1)
    return [read(part) for part in text.split(",")]
