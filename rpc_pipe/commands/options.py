"""The command line's parser, and the options that several commands share, with readers and output files."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import tempfile
from argparse import ArgumentError, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..dependency import Action, B, ConfigError, F, I, Kind, Spec, W
from ..dependency.declared import OPTIONS, REPLICAS
from ..dependency.pipeline_options import ROWS, TYPED
from ..launching.job import ELASTIC, REJOINS, TRANSPORT, TRUST, Job, current_job
from ..launching.launcher_link import NAN, NANS
from ..planning.listed_schedule import ListedSchedule
from ..planning.pipe_options import PipeOptions
from ..planning.specs import find_schedule
from ..system.files import write as write
from . import readers
from .readers import fraction, link, number, numbers, whole

if TYPE_CHECKING:
    from ..planning.simulator import Link

T = TypeVar("T")

#: the rule for `path/to/file.py:make`
MAKE = "a function that returns model, batch or model, batch, loss_fn"


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError on wrong input, and returns only the options that were typed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(argument_default=argparse.SUPPRESS, allow_abbrev=False, **settings)
        self.set_defaults(parser=self)

    def take(self, *names: str) -> None:
        """Add options of the table that commands share, each once."""
        for name in dict.fromkeys(names):
            self.add_argument(f"--{name}", **_SHARED[name])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with the word behind `--elastic` as its value if that is no name of a script."""
        words = list(args or ())
        for at, (word, following) in enumerate(pairwise([*words, ""])):
            if word == "--elastic" and not re.match(r"[\d:-]+$|[^/]*:", following):
                words[at] = "--elastic=on"
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)$", message):
            option = "" if wrong[1] == "COMMAND" else f"{wrong[1]} "
            choices = re.findall(r"[\w-]+", wrong[3])
            raise ConfigError(f"{option}{wrong[2]}: {_hint(wrong[2], choices)}known are {', '.join(choices)}")
        if bare := re.match(r"argument (--\S+): expected one argument$", message):
            wanted = self._option_string_actions[bare[1]].metavar
            raise ConfigError(f"{bare[1]}: needs a value{f' ({wanted})' if wanted else ''} that does not begin with -")
        # The project's readers name the value and the rule; argparse names the rule alone.
        raise ConfigError(re.sub(r"^argument (\S+): (?=.*: )", r"\1 ", message, flags=re.DOTALL))

    def near(self, unknown: str) -> str:
        """Return the option most similar to an unknown one."""
        return _hint(unknown.partition("=")[0], list(self._option_string_actions))


def _hint(typed: str, known: Sequence[str]) -> str:
    # A script's argument --epochs is no misspelt --steps.
    longer = [each for each in known if each.startswith(f"{typed}-")]
    near = longer or difflib.get_close_matches(typed, known, n=1, cutoff=0.75)
    return f"did you mean {' or '.join(near)}? " if near else ""


class Pairs(argparse.Action):
    """Reads `KEY=VALUE` texts, each possibly several with commas, into a dict.

    `const` is a reader, an example, and perhaps a dict of readers by key.
    With a `metavar` of `[KEY=]VALUE` a value without a key has "" as key.
    """

    def __call__(self, parser: Any, namespace: Any, text: Any, option: str | None = None) -> None:
        pairs = {**getattr(namespace, self.dest, {})}
        for part in text.split(","):
            key, equals, value = (each.strip() for each in part.partition("="))
            if not equals and str(self.metavar).startswith("["):
                key, value = "", key
            elif not (key and equals and value):
                raise ArgumentError(self, self._form(text))
            if key in pairs:
                before = f"{key}={pairs[key]}" if key else "another"
                raise ArgumentError(self, f"{part}: {before} was given before; give it once")
            try:
                pairs[key] = dict(*self.const[2:]).get(key, self.const[0])(value)
            except ArgumentTypeError as error:
                raise ArgumentError(self, f"{key}={error}" if key else self._form(text)) from None
        setattr(namespace, self.dest, pairs)

    def _form(self, text: str) -> str:
        return f"{text}: must be {self.metavar}, such as {self.const[1]}"


#: options that make a spec
SCHEDULE = ("schedule", "set", "window", "workers", "microbatches", *REPLICAS)
#: how several processes are one worker
MEMBERS = ("members", "shard", "reduce")
#: costs of a simulated schedule
COSTS = ("cost", "comm", *MEMBERS, "gather")


def _typed(
    least: int | None = None, most: int | None = None, reader: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Return the arguments of an option; `least` and `most` of a whole number, or the name of a reader."""
    if least is not None:
        return {"type": whole(least, most), **settings}
    return settings if reader is None else {"type": getattr(readers, reader), **settings}


#: the options of `Pipeline`
_OF_PIPELINE = {row.name: _typed(**row.typed) for row in ROWS.values() if row.typed}
_OF_PIPELINE |= {name: _typed(**option.typed) for name, option in OPTIONS.items()}
#: options that make a pipeline
PIPELINE = ("schedule", "set", "window", *_OF_PIPELINE, "json", "threads", "nan", "trust-network", "port")
_SHARED: dict[str, dict[str, Any]] = _OF_PIPELINE | {
    "set": dict(action=Pairs, const=(str, "chunks=2"), metavar="NAME=VALUE", help="set a parameter of the schedule"),
    "window": dict(type=whole(), help="microbatches in flight, where the schedule has a window"),
    "attention": dict(
        type=fraction, metavar="SHARE",
        help="share of a sequence's time that is causal attention, dearer for later slices (0)",
    ),
    "lengths": dict(type=numbers, metavar="L,L,...", help="relative time of each microbatch, such as 1,4,2,1 (equal)"),
    "gather": dict(type=number, help="time in which members gather a stage's weights, or sum up its results (0)"),
    "length-cost": dict(metavar="FILE", help="of profile --lengths: the numbers of --lengths are tokens"),
    "json": dict(action="store_true", help="print JSON; human text goes to stderr"),
    "cost": dict(
        action=Pairs, const=(number, "F=1,B=2"), metavar="KIND=TIME",
        help="time of a stage's action by kind (F=1,B=2,I=1,W=1,R=1; what is left out follows from the rest)",
    ),
    "link": dict(
        action=Pairs, const=(link, "2.5/1MB, or 0-1=2.5/1MB from worker 0 to 1"), metavar="[FROM-TO=]TIME[/BANDWIDTH]",
        help="travel time (plan: in ms) and bytes a unit of time (plan: a second), of all links or one",
    ),
    "comm": dict(type=number, help="time of a payload between two workers (0)"),
    "threads": dict(type=whole(1, 4096), help="torch threads of a worker (1)"),
    "nan": dict(choices=NANS, help="what to do if the loss is not finite (stop)"),
    "trust-network": dict(action="store_true", help="let workers listen where anybody who reaches them can run code"),
    "port": dict(type=whole(1, 65535), help="meet at this TCP port instead of in a file"),
}  # fmt: skip


# --- options that belong together


def refuse_typed(typed: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Refuse the options `names`, for the reason `why`.

    Raises:
        ConfigError: one was typed.
    """
    for name in names:
        if name in typed:
            value = typed[name]
            if isinstance(value, dict):
                value = "=".join(map(str, next(iter(value.items()))))
            value = value[0] if isinstance(value, list) else value
            said = "" if isinstance(value, bool) else f" {value:g}" if isinstance(value, float) else f" {value}"
            raise ConfigError(f"--{name.replace('_', '-')}{said}: {why}")


def refuse_device(device: str) -> None:
    """Refuse a device that this machine does not have, before anything slow starts."""
    if device != "cpu":
        from ..workers.compute.devices.backends import found_device

        found_device(device)


def refuse_workers(typed: Mapping[str, Any], job: Job) -> None:
    """Refuse another number of workers than this job has."""
    if typed.get("workers", job.num_workers) != job.num_workers:
        refuse_typed(typed, ["workers"], f"this job has {job.num_workers} workers; leave it out")


def typed_attention(typed: Mapping[str, Any]) -> float:
    """Return the share of attention, which has a meaning for slices only."""
    if "slices" not in typed:
        refuse_typed(typed, ["attention"], "is of slices; add --slices, such as --slices 4")
    return float(typed.get("attention", 0))


def typed_lengths(typed: Mapping[str, Any]) -> Callable[[Spec], tuple[Sequence[float], Callable[[Action], float]]]:
    """Return the function that makes, for a schedule, `by_microbatch` of the typed lengths; these may be none."""
    if "lengths" not in typed:
        unequal = "is of unequal microbatches; add --lengths, such as --lengths 1,4,2,1"
        refuse_typed(typed, ["microbatch_order", "length_cost"], unequal)
        return lambda spec: ((), lambda action: 1)
    from ..planning.unequal import by_microbatch

    made = partial(by_microbatch, lengths=typed["lengths"], order=typed.get("microbatch_order", "given"))
    if "length_cost" not in typed:
        return made
    from ..planning.unequal import read_measured, relative_times

    profile = read_measured(typed["length_cost"], f"--length-cost {typed['length_cost']}")
    return lambda spec: made(spec, relative=relative_times(profile, typed["lengths"], spec.num_stages))


def typed_costs(typed: Mapping[str, Any]) -> dict[Kind, float]:
    """Return the costs of a stage's microbatch by kind; missing costs follow from given ones, or are the defaults.

    >>> typed_costs({"cost": {"B": 3}})
    {F: 1, B: 3, I: 1.5, W: 1.5, R: 1}
    """
    from ..planning.comparison import complete_costs

    kinds = {kind.letter: kind for kind in Kind.all()}
    costs: dict[Kind, float] = {F: 1}
    for key, value in typed.get("cost", {}).items():
        if key not in kinds:
            raise ConfigError(f"--cost {key}={value:g}: kinds are {', '.join(kinds)}")
        costs[kinds[key]] = value
    if not costs.keys() & {B, I, W}:
        costs |= {B: 2, I: 1, W: 1}
    full = complete_costs(costs)
    if not any(full.values()):
        raise ConfigError(f"--cost F={full[F]:g},B={full[B]:g}: takes no time; give one of them a cost above 0")
    for kind, cost in full.items():
        if cost < 0:
            raise ConfigError(f"--cost B={full[B]:g}: B is I and W together, which leaves {cost:g} for {kind.letter}")
    return full


def set_transport(typed: Mapping[str, Any]) -> None:
    """Set the environment of the job's processes: the carrier, and the reaction to losses that are not finite."""
    variables = {"nan": NAN, "transport": TRANSPORT, "trust_network": TRUST, "elastic": ELASTIC, "rejoin": REJOINS}
    for name in variables.keys() & typed.keys():
        os.environ[variables[name]] = "on" if typed[name] is True else typed[name]


def filled(cls: type[T], typed: Mapping[str, Any]) -> T:
    """Return the dataclass `cls` with the typed options, and defaults for the rest."""
    names = {TYPED.get(field.name, field.name): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {names[name]: value for name, value in typed.items() if name in names}
    if "schedule_options" in names:
        values["schedule_options"] = schedule_options(typed)
    return cls(**values)


#: the options of checkpoints
CHECKPOINTS = {"checkpoint_every", "checkpoint_folder", "checkpoint_keep", "resume"}


def typed_checkpoints(typed: Mapping[str, Any]) -> tuple[int | None, str, int | None, str | None]:
    """Return the options of checkpoints: every how many steps, where, how many are kept, and which to resume."""
    folder = typed.get("checkpoint_folder", "checkpoints")
    return typed.get("checkpoint_every"), folder, typed.get("checkpoint_keep"), typed.get("resume")


def typed_spec(typed: Mapping[str, Any]) -> Spec:
    """Return the spec of the typed options."""
    return filled(PipeOptions, typed).of_plane()


def with_listed(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the typed options with the workers and microbatches of a schedule that is a file, unless they were typed.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not str(typed.get("schedule", "")).endswith((".csv", ".json")):
        return typed
    found = find_schedule(typed["schedule"])
    assert issubclass(found, ListedSchedule)
    workers = {} if current_job() is not None else {"workers": len(found.listed.rows)}  # which a job has already
    return {**workers, "microbatches": len(found.listed.routes), **typed}


def schedule_options(typed: Mapping[str, Any]) -> dict[str, str]:
    """Return a schedule's parameters, from `--set`, `--window`, `--replicas` and the like."""
    options: dict[str, str] = {**typed.get("set", {})}
    for name in (name for name in ("window", *OPTIONS) if name in options):
        refuse_typed(typed, [name], f"--set {name}={options[name]} says it too")
    return options | {name: str(typed[name]) for name in ("window", *OPTIONS) if name in typed}


def typed_links(typed: Mapping[str, Any], num_workers: int) -> tuple[Link | None, dict[tuple[int, int], Link]]:
    """Return the typed link between all workers, None without one, and the links that differ, by (source, target)."""
    ways = typed.get("link", {}).items()
    found = {read_ends(f"--link {ends}={way.latency:g}", ends, num_workers): way for ends, way in ways if ends}
    return typed.get("link", {}).get(""), found


def read_ends(said: str, ends: str, num_workers: int) -> tuple[int, int]:
    """Read the two workers of a link, FROM-TO."""
    source, _, target = ends.partition("-")
    if not target or source == target:
        raise ConfigError(f"{said}: must be from one worker to another, such as 0-1")
    return read_worker(said, source, num_workers), read_worker(said, target, num_workers)


def read_group(said: str, size: str) -> int:
    """Read how many neighbouring workers are a group."""
    if not size.isdecimal() or int(size) < 2:
        raise ConfigError(f"{said} {size}: must be a number of neighbouring workers, at least 2, such as 8")
    return int(size)


def read_worker(said: str, text: str, num_workers: int) -> int:
    """Read a worker's number."""
    if not text.isdecimal() or int(text) >= num_workers:
        raise ConfigError(f"{said}: worker {text}: workers are 0 to {num_workers - 1}")
    return int(text)


def try_files(typed: Mapping[str, Any], names: Iterable[str]) -> None:
    """Make the folders of the files of the options `names`, and check that all can be written.

    Raises:
        ConfigError: one cannot be, or two are the same.
    """
    taken: dict[str, str] = {}
    for name in [name for name in names if name in typed]:
        path = Path(typed[name])
        option = f"{'' if name == 'file' else f'--{name} '}{typed[name]}"
        try:
            if path.is_dir() or option.endswith("/"):
                raise ConfigError(f"{option}: is a folder; name a file in it")
            if path.is_fifo() and not os.path.realpath(path).startswith("/proc/"):  # as /dev/stdout may be
                raise ConfigError(f"{option}: is a pipe, which would wait for a reader; name a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):  # a finished file may be moved to its place
                pass
            if path.exists():
                path.open("ab").close()
        except FileExistsError as error:
            raise ConfigError(f"{option}: {error.filename} is a file, not a folder") from error
        except OSError as error:
            raise ConfigError(f"{option}: cannot be written: {error.strerror}") from error
        if (other := taken.setdefault(os.path.realpath(path), name)) != name:
            raise ConfigError(f"{option}: --{other} writes the same file")
