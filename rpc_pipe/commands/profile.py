"""`rpc-pipe profile`: measure a model block by block, and keep the profile in a file that can be edited.

With `--workers` that many processes measure at once, and the links between them; under torchrun the job's workers do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn

from ..dependency import ConfigError
from ..dependency.pipeline_options import MOST_WORKERS
from ..drawing.plans import profile_table
from ..launching import launcher_link as link
from ..launching.attempt import How
from ..launching.job import Job, current_job
from ..launching.launcher import Launcher
from ..launching.report import Reporter
from ..launching.worker_main import as_worker
from ..planning.profile import Profile, as_json, from_json
from ..planning.unequal import LengthCost, refuse_without
from ..system.files import read_json, refused
from .options import MAKE, Parser, refuse_device, refuse_workers, try_files, write
from .readers import whole, wholes
from .topology import machines_of

if TYPE_CHECKING:
    from ..planning.measuring.profiling import UserModel

#: folder of profiles, beside the model's file
_FOLDER = ".rpc_pipe"
OPTIMIZERS = ("adamw", "sgd", "momentum")
#: seconds before the first line of progress without a terminal, and between lines
_QUIET_S, _LINE_EVERY_S = 1.0, 10.0


def add(commands: Any) -> None:
    """Add `profile` to the command line."""
    parser: Parser = commands.add_parser("profile", help="measure a model block by block, and workers and links")
    add_measuring(parser)
    parser.add_argument("--workers", type=whole(1, MOST_WORKERS), help="so many measure at once, and their links")
    parser.add_argument("--rows", type=wholes, help="rows of a microbatch, such as 4 or 2,4,8 (those of the batch)")
    lengths = "measure with rows of these lengths, too, for microbatches of several lengths, such as 64,128,256"
    parser.add_argument("--lengths", type=wholes, help=lengths)
    parser.take("json")


def add_measuring(parser: Parser) -> None:
    """Add the options of measuring."""
    parser.add_argument("model", nargs="?", help=f"path/to/file.py:make, {MAKE}")
    parser.add_argument("--profile", metavar="FILE", help="file of measurements, kept or read (in .rpc_pipe/)")
    parser.add_argument("--again", action="store_true", help="measure again even if there are measurements")
    parser.add_argument("--estimate", action="store_true", help="count operations instead of running the model")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="optimizer to measure (adamw)")
    parser.add_argument("--repeats", type=whole(1, 10**6), help="how many times each block is timed (5)")
    parser.take("device", "threads")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    reporter = Reporter("json" in typed)
    job = current_job()
    if job is not None:
        return as_worker(lambda: _as_part_of(job, typed, reporter), reporter)
    workers = typed.get("workers", 0)
    show_loading(typed, reporter)
    profile, path = find_profile(typed, typed.get("rows"), reporter, at_least=max(1, workers), together=workers)
    if "lengths" in typed:
        lengths = sorted(set(typed["lengths"]))
        if len(lengths) < 3 or "model" not in typed:
            said = ",".join(map(str, lengths))
            raise ConfigError(f"--lengths {said}: needs a model, and 3 lengths, such as 64,128,256")
        profile = _with_lengths(lengths, typed, profile, path, reporter)
    _show(profile, path, reporter, typed)
    return 0


def _with_lengths(
    lengths: Sequence[int], typed: Mapping[str, Any], profile: Profile, path: Path, reporter: Reporter
) -> Profile:
    """Return the profile with times by the length of rows, measured in this process.

    Raises:
        ConfigError: the model has no sequences.
    """
    from ..planning.measuring.profiling import times_by_length

    with progress(reporter, "measuring lengths") as tell:
        settings = _measuring(typed, tell=tell, at_least=profile.num_blocks)
        found = times_by_length(load(typed)[0], min(profile.measured), lengths, **settings)
    profile = replace(profile, **found)
    _keep(profile, path)
    return profile


def _show(profile: Profile, path: Path, reporter: Reporter, typed: Mapping[str, Any]) -> None:
    if "json" in typed:
        print(json.dumps(as_json(profile)))
        return
    reporter.console.print(profile_table(profile, max(profile.measured)))
    if profile.topology:
        usual = profile.topology.get("link")
        speeds = ", ".join(f"{worker.get('speed', 1):g}" for worker in profile.topology["workers"])
        reporter.text(f"{profile.workers} workers at once, of speed {speeds}")
        for name, way in {"any two": usual, **profile.topology.get("links", {})}.items():
            if way:
                where = f"{way.get('latency_ms', 0):g} ms and {way.get('bandwidth', 'any number of bytes')}/s"
                reporter.text(f"between {name.replace('-', ' and ')}: {where}")
        reporter.text(f"a step takes {profile.per_step:.2g} ms besides its actions")
        reporter.text(f"to send or receive a MiB takes {profile.per_mib:.2g} ms of computing")
    if profile.by_length:
        cost = LengthCost.of(profile)
        terms = f"{1e3 * cost.fixed:.3g} ms + {1e6 * cost.token:.3g} us a token"
        reporter.text(f"a microbatch takes {terms} + {1e9 * cost.attention:.3g} ns a token and place of its row")
    reporter.text(f"kept in {path}, which may be edited")


def _as_part_of(job: Job, typed: Mapping[str, Any], reporter: Reporter) -> None:
    """Measure as one worker of a job; worker 0 writes the merged profile."""
    refuse_workers(typed, job)
    from ..planning.measuring.joint_profile import profile_together

    user_model, of_batch = load(typed)
    rows = typed.get("rows") or [of_batch]
    settings = _measuring(typed)
    if job.rank == 0:
        say: Callable[[str], None] = lambda text: link.tell(kind="progress", text=text)  # noqa: E731
        say("measuring links, and the time of the runtime")
        settings["tell"] = lines_of(say, "measuring")
    profile, worker = profile_together(user_model, rows, job.num_workers, settings)
    if worker == 0:
        name, path = _place(user_model, typed, job.num_workers)
        _keep(replace(profile, signature=name), path)
        if "json" in typed or not link.present():  # otherwise the launcher's process shows it
            _show(profile, path, reporter, typed)


def load(typed: Mapping[str, Any]) -> tuple[UserModel, int]:
    """Load the user's model, to be measured in this process; return it and the rows of its batch.

    Raises:
        ConfigError: no model is named, or it cannot be measured.
    """
    if "model" not in typed:
        raise ConfigError(f"profile: needs path/to/file.py:make, {MAKE}")
    import torch

    from ..planning.measuring.profiling import load_user_model, refuse_split, rows_of

    refuse_device(typed.get("device", "cpu"))
    torch.set_num_threads(typed.get("threads", 1))
    user_model = load_user_model(typed["model"])
    refuse_split(user_model, typed["model"])
    return user_model, rows_of(user_model.batch)


def refuse_unplanned(profile: Profile, shard: str) -> None:
    """Refuse to divide a model by a plan that it does not have."""
    if shard == "tp" and not any("tp" in block.divided for blocks in profile.measured.values() for block in blocks):
        raise ConfigError("--shard tp: the measured model has no tp_plan; take fsdp, or measure it --again")


def show_loading(typed: Mapping[str, Any], reporter: Reporter) -> None:
    """Show that a model is loaded, which takes seconds, as torch is loaded first."""
    if "model" in typed:
        reporter.progress(f"loading {typed['model']}")


def find_profile(
    typed: dict[str, Any], rows: Sequence[int] | None, reporter: Reporter, *, at_least: int = 1, together: int = 0
) -> tuple[Profile, Path]:
    """Return the profile, from its file or measured, and the file.

    Args:
        rows: of microbatches; None: the rows of the batch.
        at_least: the wanted number of blocks; with fewer, the parts of blocks are measured.
        together: number of processes that measure at once; 0: this process alone.

    Raises:
        ConfigError: there is neither a model nor a profile.
    """
    if "profile" in typed and "model" not in typed:
        given = Path(typed["profile"])
        return read_profile(given), given
    if "profile" in typed:
        try_files(typed, ["profile"])
    user_model, of_batch = load(typed)
    if together and not _fits(user_model, together):
        reporter.text(f"{together} copies of the model do not fit here: one process measures")
        together = 0
    name, path = _place(user_model, typed, together)
    wanted = sorted({min(count, 10**6) for count in rows or [of_batch]})
    kept: dict[str, Any] = {}
    found = path.exists() and path.stat().st_size and "again" not in typed
    known = read_profile(path) if found else None
    if known is not None and known.signature == name:
        if is_fine := known.num_blocks >= at_least:
            kept = {"by_length": known.by_length, "length": known.length}
        if is_fine and set(wanted) <= set(known.measured):
            return known, path
        wanted = sorted({*wanted, *known.measured})
    if together and "estimate" not in typed:
        _measure_together(typed, wanted, together, path, reporter)
        profile = read_profile(path)
    else:
        from ..planning.measuring.profiling import profile_model

        with progress(reporter, "measuring") as tell:
            profile = profile_model(user_model, wanted, **_measuring(typed, tell=tell, at_least=at_least))
    profile = replace(profile, signature=name, **kept)  # the signature is looked for the next time
    _keep(profile, path)
    return profile, path


def with_slices(typed: Mapping[str, Any], profile: Profile, path: Path, most: int, reporter: Reporter) -> Profile:
    """Return the profile with times by the length of rows, which price slices of sequences.

    Args:
        most: the largest number of slices.

    Raises:
        ConfigError: there is no model to measure, or its sequences are shorter.
    """
    if most > 1 and not profile.by_length and "model" in typed:
        profile = _with_lengths([], typed, profile, path, reporter)
    if most > 1:
        refuse_without(profile, f"--slices {most}: {path}")
    if 1 < profile.length < most:
        raise ConfigError(f"--slices {most}: sequences have {profile.length} places; take at most {profile.length}")
    return profile


def _fits(user_model: UserModel, copies: int) -> bool:
    """Return whether this machine has memory for `copies` copies of a model with gradients, as far as is known."""
    from torch import nn

    model = user_model.model
    layers = user_model.layers() if user_model.is_layers else [model]
    held = sum(p.nbytes for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters())
    return 2 * copies * held < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _settings(typed: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"device": "cpu", "optimizer": "adamw"}
    return {name: typed.get(name, said) for name, said in usual.items()} | {"estimate": "estimate" in typed}


def _measuring(typed: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**_settings(typed), "repeats": typed.get("repeats", 5), **more}


def _place(user_model: UserModel, typed: Mapping[str, Any], together: int) -> tuple[str, Path]:
    """Return the signature of the model and options, and the file of its profile."""
    from ..planning.measuring.profiling import signature

    more = [f"{together} workers"] if together else []
    name = signature(user_model, *_settings(typed).values(), typed.get("threads", 1), *more)
    if "profile" in typed:
        return name, Path(typed["profile"])
    return name, Path(typed["model"].rpartition(":")[0]).resolve().parent / _FOLDER / f"profile-{name}.json"


def _measure_together(
    typed: Mapping[str, Any], rows: Sequence[int], workers: int, path: Path, reporter: Reporter
) -> None:
    """Measure the model in several processes at once, and write the merged profile to `path`.

    Raises:
        ConfigError: the workers failed; the cause has been printed.
    """
    told = {"profile": path, "workers": workers, "rows": ",".join(map(str, rows))}
    told |= {name: typed[name] for name in ("optimizer", "repeats", "device", "threads") if name in typed}
    arguments = ["profile", typed["model"], "--again", *(f"--{name}={said}" for name, said in told.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    reporter.progress(f"measuring with {workers} workers at once")
    before = path.stat().st_mtime_ns if path.exists() else 0
    how = How(typed.get("threads"), watched=False)
    code = Launcher(arguments, workers, Reporter("json" in typed), how).run()
    if code or not path.exists() or path.stat().st_mtime_ns == before:
        raise ConfigError(f"--workers {workers}: could not measure, as told above; --alone measures in one process")


def _keep(profile: Profile, path: Path) -> None:
    with refused(ConfigError, f"--profile {path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(path), json.dumps(as_json(profile), indent=1))


def read_profile(path: Path) -> Profile:
    """Read a profile from a file.

    Raises:
        ConfigError: there is none, or it is none.
    """
    said = f"--profile {path}"
    profile = from_json(read_json(path, said), said)
    if profile.topology:
        machines_of(f"{said}: topology", profile.topology)
    return profile


def lines_of(say: Callable[[str], None], what: str) -> Callable[..., None]:
    """Return a function of the progress, 0 to 1, and a note; it prints a line for a new note and every few seconds."""
    due, shown = time.monotonic() + _QUIET_S, ""

    def tell(done: float, note: str = "") -> None:
        nonlocal due, shown
        if note != shown or time.monotonic() > due:
            due, shown = time.monotonic() + _LINE_EVERY_S, note
            say(f"{what} {note}: {done:.0%}".replace(" :", ":"))

    return tell


@contextmanager
def progress(reporter: Reporter, what: str) -> Iterator[Callable[..., None]]:
    """Show progress on stderr; yield a function that takes it, 0 to 1, and a note.

    On a terminal it is a bar, which is erased at its end.
    """
    if not reporter.aside.is_terminal:
        yield lines_of(reporter.progress, what)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with Progress(*columns, console=reporter.aside, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done, note="": bar.update(task, completed=done, description=f"{what} {note}".rstrip())
