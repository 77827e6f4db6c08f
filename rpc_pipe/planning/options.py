"""From what a user typed to a spec: schedules by name or file, their parameters, costs. Torch-free."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dependency import ConfigError, Kind, Order, Spec, blaming, check_all
from ..model.cut import cut
from ..schedules import SCHEDULES
from .simulator import Link
from .torch_csv import import_csv

#: a schedule as `Pipeline` and the command line take it
ScheduleLike = str | type[Spec]


def find_schedule(schedule: ScheduleLike) -> type[Spec]:
    """Return the spec class for a name, `path/to/file.py:ClassName`, torch's `path/to/file.csv` or a class.

    Raises:
        ConfigError: there is none; the text offers the nearest name.
    """
    if not isinstance(schedule, str):
        return schedule
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    if schedule.endswith(".csv"):
        return import_csv(schedule)
    path, colon, name = schedule.rpartition(":")
    if colon and path.endswith(".py"):
        return _load_class(schedule, Path(path), name)
    near = difflib.get_close_matches(schedule, SCHEDULES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"schedule {schedule!r}: {hint}known are {', '.join(SCHEDULES)}; "
        "your own is path/to/file.py:ClassName, or torch's path/to/file.csv"
    )


def _load_class(schedule: str, path: Path, name: str) -> type[Spec]:
    if not path.is_file():
        raise ConfigError(f"schedule {schedule!r}: there is no file {path}")
    module_name = f"rpc_pipe_schedule_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look the module of a class up by name
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # what stands beside the file can be imported, as beside a script
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"schedule {schedule!r}: {path} raised {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Spec)):
        here = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Spec) and value.__module__ == module_name
        ]
        raise ConfigError(
            f"schedule {schedule!r}: {path} has no subclass of Spec named {name!r}; it has {', '.join(here) or 'none'}"
        )
    return found


def make_spec(
    schedule: ScheduleLike,
    num_workers: int,
    num_microbatches: int,
    parameters: Mapping[str, Any] | None = None,
) -> Spec:
    """Make the spec of a schedule; parameters may be text, as typed after `--set`.

    Raises:
        ConfigError: a number or parameter that cannot be.
    """
    cls = find_schedule(schedule)
    name = schedule if isinstance(schedule, str) else cls.__name__
    if num_workers < 1:
        raise ConfigError(f"workers {num_workers}: must be at least 1")
    if num_microbatches < 1:
        raise ConfigError(f"microbatches {num_microbatches}: must be at least 1")
    known = parameter_types(cls)
    values = {}
    for key, value in (parameters or {}).items():
        if key not in known:
            raise ConfigError(f"{key}: schedule {name} has no such parameter; it has {', '.join(known) or 'none'}")
        values[key] = _convert(name, key, value, known[key])
    try:
        with blaming(cls):
            return cls(num_workers=num_workers, num_microbatches=num_microbatches, **values)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"schedule {name}: {error}") from error


def parameter_types(cls: type[Spec]) -> dict[str, Any]:
    """Return the schedule's own parameters with their types."""
    hints = typing.get_type_hints(cls)
    own = (parameter.name for parameter in dataclasses.fields(cls))
    return {name: hints[name] for name in own if name not in ("num_workers", "num_microbatches")}


def _convert(schedule: str, key: str, value: Any, wanted: Any) -> Any:
    if not isinstance(value, str):
        return value
    choices = typing.get_args(wanted)
    if typing.get_origin(wanted) is typing.Literal:
        for choice in choices:
            if str(choice) == value:
                return choice
        raise ConfigError(f"{key}={value}: schedule {schedule} takes {', '.join(map(str, choices))}")
    types = [kind for kind in choices or (wanted,) if kind is not type(None)]
    for kind in types:
        if kind is bool:
            if value.lower() in ("true", "false"):
                return value.lower() == "true"
            continue
        try:
            return kind(value)
        except ValueError:
            continue
    names = " or ".join(kind.__name__ for kind in types)
    raise ConfigError(f"{key}={value}: schedule {schedule} takes {names}")


@dataclass(frozen=True, kw_only=True)
class PipeOptions:
    """How the pipeline is made."""

    workers: int = 2
    schedule: str = "1f1b"
    schedule_options: dict[str, str] = field(default_factory=dict)
    microbatches: int = 8
    order: Order | None = None
    split: list[int] | None = None
    device: str = "cpu"
    seed: int = 0
    threads: int = 1
    steps: int = 100

    def for_pipeline(self) -> dict[str, Any]:
        """Return the options that `Pipeline` takes as they are."""
        return {
            "num_microbatches": self.microbatches,
            "num_workers": self.workers,
            "schedule": self.schedule,
            "schedule_options": dict(self.schedule_options),
            "split": self.split,
            "order": self.order,
            "device": self.device,
            "seed": self.seed,
        }

    def spec(self, num_layers: int) -> Spec:
        """Make the spec and check everything that can be checked before a worker is started.

        Raises:
            ConfigError: an option that cannot work.
            ScheduleError: a relation that cannot run.
        """
        for name in ("threads", "steps"):
            at_least(name, getattr(self, name), 1)
        spec = make_spec(self.schedule, self.workers, self.microbatches, self.schedule_options)
        check_all(spec)
        cut(num_layers, spec.num_stages, self.split)
        return spec


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a number that is too small."""
    if value < least:
        raise ConfigError(f"--{name} {value}: must be at least {least}")


def parse_assignments(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Read `key=value` texts, each possibly several with commas.

    >>> parse_assignments("--set", ["chunks=2", "a=1,b=2"])
    {'chunks': '2', 'a': '1', 'b': '2'}
    """
    pairs: dict[str, str] = {}
    for text in ",".join(texts).split(",") if texts else []:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"{option} {text}: must be key=value")
        pairs[key.strip()] = value.strip()
    return pairs


def schedule_options(assignments: Sequence[str], window: int | None) -> dict[str, str]:
    """Read a schedule's parameters from `--set` and `--window`."""
    options = parse_assignments("--set", assignments)
    return options if window is None else {**options, "window": str(window)}


def parse_factors(option: str, text: str | None, count: int, of: str) -> list[float]:
    """Read one factor for each of `count` things; all 1 if nothing was typed."""
    if text is None:
        return [1] * count
    parts = text.split(",")
    if len(parts) != count:
        raise ConfigError(f"{option} {text}: has {len(parts)} factors, but there are {count} {of}")
    return [parse_number(option, part.strip()) for part in parts]


def parse_links(option: str, texts: Sequence[str], num_workers: int) -> dict[tuple[int, int], Link]:
    """Read travel times by link, `FROM-TO=TIME` or `FROM-TO=TIME/BANDWIDTH`, in bytes a unit of time.

    >>> parse_links("--link", ["0-1=2.5/1MB"], 2)
    {(0, 1): Link(latency=2.5, bandwidth=1000000.0)}
    """
    links = {}
    for key, value in parse_assignments(option, texts).items():
        ends = key.split("-")
        if len(ends) != 2 or not all(end.isdigit() and int(end) < num_workers for end in ends):
            raise ConfigError(f"{option} {key}={value}: must be FROM-TO=TIME with workers 0 to {num_workers - 1}")
        latency, slash, bandwidth = value.partition("/")
        width = parse_bytes(f"{option} {key}", bandwidth) if slash else float("inf")
        if width == 0:
            raise ConfigError(f"{option} {key}={value}: a bandwidth must be above 0")
        links[int(ends[0]), int(ends[1])] = Link(parse_number(f"{option} {key}", latency), width)
    return links


def parse_bytes(option: str, text: str) -> float:
    """Read an amount of memory.

    >>> parse_bytes("--memory limit", "1.5GB")
    1500000000.0
    """
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1}
    for unit, size in units.items():
        if text.upper().endswith(unit):
            return parse_number(option, text[: -len(unit)].strip()) * size
    return parse_number(option, text)


def parse_costs(text: str) -> dict[Kind, float]:
    """Read the costs of a microbatch of a stage by kind; whole numbers stay whole.

    >>> parse_costs("F=1,B=2.5")
    {F: 1, B: 2.5}
    """
    costs: dict[Kind, float] = {}
    for key, value in parse_assignments("--cost", [text]).items():
        if key not in Kind.__members__:
            raise ConfigError(f"--cost {key}={value}: kinds are {', '.join(Kind.__members__)}")
        costs[Kind[key]] = parse_number(f"--cost {key}", value)
    return costs


def parse_number(option: str, text: str) -> float:
    """Read a number of at least 0; whole numbers stay whole, so that sums of them are exact."""
    try:
        number = int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ConfigError(f"{option}={text}: must be a number") from None
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{option}={text}: must be at least 0")
    return number
