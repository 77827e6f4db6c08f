"""Options that several commands share, and parsers of numbers, bytes, costs and links."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..dependency import B, ConfigError, F, I, Kind, Spec, W
from ..launching.job import TRANSPORT, TRANSPORTS, TRUST, Job
from ..launching.launcher_link import NAN, NANS
from ..planning.specs import PipeOptions, make_spec

if TYPE_CHECKING:
    from ..planning.simulator import Link

T = TypeVar("T")

#: environment variable of workers: file of a plan whose runs are recorded
NOTED_PLAN = "RPC_PIPE_PLAN"
#: what `path/to/file.py:make` must be
MAKE = "a function that returns model, batch or model, batch, loss_fn"


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError on wrong input, and returns only the options that were typed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(argument_default=argparse.SUPPRESS, allow_abbrev=False, **settings)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)$", message):
            commands = re.findall(r"[\w-]+", wrong[2])
            raise ConfigError(f"{wrong[1]}: {_hint(wrong[1], commands)}commands are {', '.join(commands)}")
        if wrong := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)$", message):
            choices = re.findall(r"[\w-]+", wrong[3])
            raise ConfigError(f"{wrong[1]} {wrong[2]}: {_hint(wrong[2], choices)}known are {', '.join(choices)}")
        # Our own types have said the value and the rule; argparse says the rule alone.
        raise ConfigError(re.sub(r"^argument (\S+): (?=.* must be )", r"\1 ", message))

    def refuse(self, unknown: Sequence[str]) -> None:
        """Refuse unknown arguments."""
        if unknown:
            near = self.near(unknown)
            raise ConfigError(f"{' '.join(unknown)}: {near}{self.prog} --help lists what can be typed")

    def near(self, unknown: Sequence[str], cutoff: float = 0.6) -> str:
        """Return the option most similar to the first unknown one."""
        return _hint(unknown[0].partition("=")[0], list(self._option_string_actions), cutoff) if unknown else ""


def _hint(typed: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    longer = [each for each in known if each.startswith(f"{typed}-")]
    near = longer or difflib.get_close_matches(typed, known, n=1, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}? " if near else ""


def add_schedule(parser: Parser) -> None:
    """Add the options that make a spec."""
    parser.add_argument("--schedule", help="name or path/to/file.py:ClassName (1f1b)")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="set a parameter of the schedule")
    parser.add_argument("--window", type=whole(), help="microbatches in flight, where the schedule has a window")
    parser.add_argument("--workers", type=whole(1), help="number of workers (2)")
    add_replicas(parser)
    parser.add_argument("--microbatches", type=whole(1), help="microbatches of a step, of all replicas together (8)")


def add_replicas(parser: Parser) -> None:
    """Add how many replicas there are, and how they exchange gradients."""
    parser.add_argument("--replicas", type=whole(1), help="replicas of the pipeline, which share the workers (1)")
    parser.add_argument("--zero", type=whole(0), help="1: divide optimizer states among the replicas (0)")
    parser.add_argument("--bucket", metavar="MIB", help="largest part of gradients that replicas exchange at once (25)")
    parser.add_argument("--spread", help="stages: put the replicas of a stage far apart, not each pipeline (pipelines)")


def typed_exchange(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return how replicas exchange gradients, as parameters of a schedule."""
    return {name: typed[name] for name in ("zero", "bucket", "spread") if name in typed}


def add_order(parser: Parser) -> None:
    """Add in what order workers run what is ready."""
    orders = "ready", "fixed"
    parser.add_argument("--order", choices=orders, help="run what is ready, or in a fixed order (as the schedule says)")


def add_slices(parser: Parser) -> None:
    """Add into what sequences are cut."""
    parser.add_argument("--slices", metavar="K", help="cut sequences into K slices, or sizes such as 8,6,5,4 (1)")


def add_attention(parser: Parser) -> None:
    """Add how much dearer later slices are."""
    share = "share of a sequence's time that is causal attention, dearer for later slices (0)"
    parser.add_argument("--attention", type=fraction, metavar="SHARE", help=share)


def refuse_typed(typed: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Refuse the options `names`, for the reason `why`.

    Raises:
        ConfigError: one was typed.
    """
    for name in names:
        if name in typed:
            value = typed[name][0] if isinstance(typed[name], list) else typed[name]
            said = "" if isinstance(value, bool) else f" {value:g}" if isinstance(value, float) else f" {value}"
            raise ConfigError(f"--{name.replace('_', '-')}{said}: {why}")


def refuse_workers(typed: Mapping[str, Any], job: Job) -> None:
    """Refuse another number of workers than this job has."""
    if typed.get("workers", job.num_workers) != job.num_workers:
        refuse_typed(typed, ["workers"], f"this job has {job.num_workers} workers; leave it out")


def typed_attention(typed: Mapping[str, Any]) -> float:
    """Return the share of attention, which has a meaning for slices only."""
    if "slices" not in typed:
        refuse_typed(typed, ["attention"], "is of slices; add --slices, such as --slices 4")
    return float(typed.get("attention", 0))


def add_json(parser: Parser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON; human text goes to stderr")


def add_pipeline(parser: Parser) -> None:
    """Add the options that make a pipeline."""
    add_schedule(parser)
    add_slices(parser)
    add_order(parser)
    add_json(parser)
    parser.add_argument("--split", type=wholes, help="layers of each stage, such as 3,2,2,3 (even)")
    parser.add_argument("--device", type=device, help="cpu, cuda (each worker of a host its own GPU) or cuda:N (cpu)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), help="seed of everything random (0)")
    parser.add_argument("--threads", type=whole(1, 4096), help="torch threads of a worker (1)")
    parser.add_argument("--transport", choices=TRANSPORTS, help="torch RPC, ZeroMQ, or all in one process (rpc)")
    parser.add_argument("--nan", choices=NANS, help="what to do if the loss is not finite (stop)")
    trust = "let workers listen where anybody who reaches them can run code"
    parser.add_argument("--trust-network", action="store_true", help=trust)
    parser.add_argument("--port", type=whole(1, 65535), help="meet at this TCP port instead of in a file")


def set_transport(typed: Mapping[str, Any]) -> None:
    """Set the environment of the job's processes: the carrier, and the reaction to losses that are not finite."""
    if "nan" in typed:
        os.environ[NAN] = typed["nan"]
    if "transport" in typed:
        os.environ[TRANSPORT] = typed["transport"]
    if "trust_network" in typed:
        os.environ[TRUST] = "on"


def add_costs(parser: Parser, more: str = "") -> None:
    """Add the options for costs of actions and payloads."""
    text = f"time by kind {more}".rstrip()
    parser.add_argument("--cost", help=f"{text} (F=1,B=2,I=1,W=1,R=1; what is left out follows from the rest)")
    parser.add_argument("--comm", help="time of a payload between two workers (0)")


def filled(cls: type[T], typed: Mapping[str, Any]) -> T:
    """Return the dataclass `cls` with the typed options, and defaults for the others."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {name: value for name, value in typed.items() if name in names}
    if "schedule_options" in names:
        values["schedule_options"] = schedule_options(typed)
    return cls(**values)


def typed_checkpoints(typed: Mapping[str, Any]) -> tuple[int | None, str, int | None, str | None]:
    """Return the options of checkpoints: every how many steps, where, how many are kept, and which to resume."""
    folder = typed.get("checkpoint_folder", "checkpoints")
    return typed.get("checkpoint_every"), folder, typed.get("checkpoint_keep"), typed.get("resume")


def typed_spec(typed: Mapping[str, Any]) -> Spec:
    """Return the spec of the typed options."""
    settings = filled(PipeOptions, typed)
    return make_spec(settings.schedule, settings.workers, settings.microbatches, settings.schedule_options)


def schedule_options(typed: Mapping[str, Any]) -> dict[str, str]:
    """Read a schedule's parameters from `--set`, `--window`, `--replicas` and the like."""
    options = parse_assignments("--set", typed.get("set", []))
    for name in ("window", "replicas", "slices", "zero", "bucket", "spread"):
        if name in options:
            refuse_typed(typed, [name], f"--set {name}={options[name]} says it too")
        if name in typed:
            options[name] = str(typed[name])
    return options


def device(text: str) -> str:
    """Read the name of a device, for `add_argument`; only torch can say whether it exists."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text}: must be cpu, cuda or cuda:N")
    return text


# --- numbers


def whole(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers, for `add_argument`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"{text}: must be at most {most}")
        return number

    return read


def number(text: str) -> float:
    """Read a number of at least 0, for `add_argument`."""
    try:
        return parse_number("", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None


def fraction(text: str) -> float:
    """Read a share, for `add_argument`."""
    found = number(text)
    if found >= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be less than 1")
    return found


def parse_number(option: str, text: str) -> float:
    """Read a number of at least 0; whole numbers stay whole, so that sums of them are exact."""
    try:
        found = int(text) if text.isdecimal() else float(text)
    except ValueError:
        found = -1
    if not 0 <= found < float("inf"):
        raise ConfigError(f"{_said(option, text)}: must be a number of at least 0")
    return found


def _said(option: str, text: str) -> str:
    return f"{option}{text}" if option.endswith(("=", "/")) else f"{option} {text}"


def parse_worker(option: str, text: str, num_workers: int) -> int:
    """Read a worker's number."""
    if not text.isdecimal() or int(text) >= num_workers:
        raise ConfigError(f"{option}: worker {text}: workers are 0 to {num_workers - 1}")
    return int(text)


def parse_bytes(option: str, text: str, *, some: bool = False) -> float:
    """Read an amount of memory; `some`: that must not be 0.

    >>> parse_bytes("--memory limit=", "1.5GB")
    1500000000.0
    """
    from ..system.sizes import read_bytes

    found = read_bytes(text)
    if some and found == 0:
        raise ConfigError(f"{_said(option, text)}: must be above 0")
    if found is None:
        raise ConfigError(f"{_said(option, text)}: must be a number of bytes, such as 500MB or 1.5GB")
    return found


# --- several in one


_FORMS = {
    "--cost": "KIND=TIME, such as F=1,B=2",
    "--link": "FROM-TO=TIME, such as 0-1=2.5",
    "--memory": "WHAT=BYTES, such as activations=64MB,limit=8GB",
    "--set": "NAME=VALUE, such as chunks=2",
    "--slow": "WORKER=FACTOR, such as 1=1.5",
}


def parse_assignments(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Read `key=value` texts, each possibly several with commas.

    >>> parse_assignments("--set", ["chunks=2", "a=1,b=2"])
    {'chunks': '2', 'a': '1', 'b': '2'}
    """
    pairs: dict[str, str] = {}
    for text in ",".join(texts).split(",") if texts else []:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"{option} {text}: must be {_FORMS[option]}")
        if key in pairs:
            raise ConfigError(f"{option} {text}: {key}={pairs[key]} was given before; give it once")
        pairs[key] = value
    return pairs


def parse_factors(option: str, text: str, count: int, of: str) -> list[float]:
    """Read one factor for each of `count` things."""
    parts = text.split(",")
    if len(parts) != count:
        raise ConfigError(f"{option} {text}: has {len(parts)} factors, but there are {count} {of}")
    return [parse_number(f"{option} {text}: factor", part.strip()) for part in parts]


def parse_links(option: str, texts: Sequence[str], num_workers: int) -> dict[tuple[int, int], Link]:
    """Read links, `FROM-TO=LATENCY` or `FROM-TO=LATENCY/BANDWIDTH`, in bytes a unit of time.

    >>> parse_links("--link", ["0-1=2.5/1MB"], 2)
    {(0, 1): Link(latency=2.5, bandwidth=1000000.0)}
    """
    from ..planning.simulator import Link

    links = {}
    for key, value in parse_assignments(option, texts).items():
        name = f"{option} {key}={value}"
        ends = key.split("-")
        if len(ends) != 2:
            raise ConfigError(f"{name}: must be FROM-TO=TIME with workers 0 to {num_workers - 1}")
        source, target = (parse_worker(name, end, num_workers) for end in ends)
        latency, slash, bandwidth = value.partition("/")
        width = parse_bytes(f"{option} {key}={latency}/", bandwidth, some=True) if slash else float("inf")
        links[source, target] = Link(parse_number(f"{option} {key}=", latency), width)
    return links


def parse_costs(text: str = "") -> dict[Kind, float]:
    """Read the costs of a stage's microbatch by kind; missing ones follow from the others, or are the defaults.

    >>> parse_costs("B=3")
    {F: 1, B: 3, I: 1.5, W: 1.5, R: 1}
    """
    from ..planning.compare import complete_costs

    costs: dict[Kind, float] = {F: 1}
    for key, value in parse_assignments("--cost", [text] if text else []).items():
        kinds = {kind.letter: kind for kind in Kind.all()}
        if key not in kinds:
            raise ConfigError(f"--cost {key}={value}: kinds are {', '.join(kinds)}")
        costs[kinds[key]] = parse_number(f"--cost {key}=", value)
    if not costs.keys() & {B, I, W}:
        costs |= {B: 2, I: 1, W: 1}
    full = complete_costs(costs)
    for kind, cost in full.items():
        if cost < 0:
            raise ConfigError(f"--cost {text}: B is I and W together, which leaves {cost:g} for {kind.letter}")
    return full


def wholes(text: str) -> list[int]:
    """Read whole numbers of at least 1 with commas, for `add_argument`."""
    if not re.fullmatch("0*[1-9][0-9]*(,0*[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers of at least 1 with commas, such as 3,2,2,3")
    return [int(part) for part in text.split(",")]
