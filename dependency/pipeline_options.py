"""The options of a pipeline, a row for each: type, default, rule, form on the command line. Loads without torch.

`Pipeline`, the command line, `run` over a script, plans and workers read the rows. A new option is a row here, an
argument of `Pipeline`, and the place that reads `worker.options`. Rows of `Parallelism` are parameters of schedules.
"""

# ruff: noqa: RUF009 - an option is a field

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from .declared import FSDP, OPTIONS, Order, with_parallelism
from .errors import ConfigError

#: orders of the microbatches of a step
MICROBATCH_ORDERS = ("given", "balanced")
#: names of the divisions of a stage over members, and the moments at which members sum gradients
SHARDS, REDUCES = (*FSDP, "tp"), ("step", "microbatch")
#: carriers of payloads between workers
TRANSPORTS = ("rpc", "zmq", "local")
#: most workers of a schedule, which are simulated in seconds
MOST_WORKERS = 100_000


class OptionRow(NamedTuple):
    """How an option is read."""

    allows: Callable[[Any], object]
    #: the values that are allowed, in the words of an error
    rule: str
    #: of the command line: its name without dashes; how it is read; texts may differ from those of scripts
    name: str
    typed: Mapping[str, Any]
    #: whether all workers must have the same value
    alike: bool


def _option(
    usual: Any,
    allows: Callable[[Any], object] = lambda value: True,
    rule: str = "",
    alike: bool = False,
    typed: str = "",
    **how: Any,
) -> Any:
    return field(default=usual, metadata={"row": OptionRow(allows, rule, typed, how, alike)})


def _choice(usual: Any, choices: Sequence[str], typed: str, **how: Any) -> Any:
    rule = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    return _option(usual, choices.__contains__, rule, True, typed, choices=choices, **how)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _none_or(allows: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda value: value is None or allows(value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The arguments of `Pipeline` beside the model, its loss and its training; their meaning stands there."""

    plan: Any = _option(None)
    schedule: Any = _option("1f1b", typed="schedule", help="name or path/to/file.py:ClassName (1f1b)")
    schedule_options: Mapping[str, Any] | None = _option(None)
    num_microbatches: int = _option(
        0, _whole(1), "a whole number of at least 1; without a plan there is no default: the more, the smaller the "
        "bubble, such as 4 times the workers",
        typed="microbatches", least=1, help="microbatches of a step, of all replicas together (8)",
    )  # fmt: skip
    num_workers: int | None = _option(
        None, _none_or(_whole(1)), "a whole number of at least 1", typed="workers", least=1, most=MOST_WORKERS,
        help="number of workers (2)",
    )  # fmt: skip
    members: int = _option(
        1, _whole(1), "a whole number of at least 1", True, "members", least=1,
        help="processes that are one worker together, of those of --workers (1)",
    )  # fmt: skip
    shard: Any = _option(
        None, lambda said: said is None or callable(said) or said in SHARDS,
        f"{', '.join(SHARDS)} or a function of (module, mesh)", typed="shard", choices=SHARDS,
        help="how members share a stage: FSDP2, gathered once a step, or tp_plan",
    )  # fmt: skip
    reduce: str = _choice("step", REDUCES, "reduce", help="when members sum gradients of fsdp (step)")
    mp_policy: Any = _option(None)
    order: Order | None = _option(
        None, (None, "ready", "fixed").__contains__, "ready or fixed, or None for the schedule's own", True, "order",
        choices=("ready", "fixed"), help="run what is ready, or in a fixed order (as the schedule says)",
    )  # fmt: skip
    microbatch_order: str = _choice(
        "given", MICROBATCH_ORDERS, "microbatch-order", help="balanced: in an order that keeps workers busy (given)"
    )
    microbatch_cost: Any = _option(None)
    compile: Any = _option(
        False, lambda said: said is None or isinstance(said, bool | Mapping),
        "True, False, or options of torch.compile by name", typed="compile", action="store_true",
        help="let torch.compile compile each layer or block alone",
    )  # fmt: skip
    split: Sequence[int] | None = _option(
        None, typed="split", reader="wholes", help="layers of each stage, such as 3,2,2,3 (even)"
    )
    blocks: str | Sequence[str] | None = _option(None)
    example: Any = _option(None)
    device: str | None = _option(
        None, typed="device", reader="device",
        help="cpu, cuda or the like (each worker of a host its own GPU), or cuda:N (cpu)",
    )  # fmt: skip
    seed: int = _option(
        0, lambda seed: _whole(0)(seed) and seed < 2**63, "a whole number of at least 0, below 2**63",
        typed="seed", least=0, most=2**63 - 1,
        help="seed of everything random (0)",
    )  # fmt: skip
    transport: str | None = _option(
        None, (None, *TRANSPORTS).__contains__, "rpc, zmq or local", typed="transport", choices=TRANSPORTS,
        help="torch RPC, ZeroMQ, or all in one process (rpc)",
    )  # fmt: skip
    stall_s: float = _option(
        300.0, lambda said: isinstance(said, int | float) and not isinstance(said, bool) and said > 0,
        "a number of seconds above 0",
    )  # fmt: skip

    @classmethod
    def taken(cls, said: Mapping[str, Any]) -> Options:
        """Return the options among a call's arguments; options of `Parallelism` become parameters of the schedule."""
        own = {name: said[name] for name in ROWS}
        parameters = with_parallelism(own["schedule_options"], **{name: said[name] for name in OPTIONS})
        return cls(**{**own, "schedule_options": parameters})

    def checked(self) -> Options:
        """Return the options.

        Raises:
            ConfigError: a value is not allowed.
        """
        for name, row in ROWS.items():
            if not row.allows(value := getattr(self, name)):
                raise ConfigError(f"{name}={value!r}: must be {row.rule}")
        return self

    def alike(self) -> str:
        """Return the options that all workers must have alike and that are not the usual ones, as text."""
        found = {name: getattr(self, name) for name, row in ROWS.items() if row.alike}
        return "".join(f", {name}={said}" for name, said in found.items() if said != getattr(Options, name))


#: the rows by name
ROWS: Mapping[str, OptionRow] = {each.name: each.metadata["row"] for each in fields(Options)}
#: argument of `Pipeline` -> option of the command line, as a Python name
TYPED: Mapping[str, str] = {name: (row.name or name).replace("-", "_") for name, row in ROWS.items()}
