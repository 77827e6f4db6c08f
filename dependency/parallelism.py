"""The options that divide training further than into stages: replicas of the pipeline, and slices of sequences.

A field of `Parallelism` is the one place of an option: its default, its type, its rule and its help text. `Pipeline`,
the command line and `make_spec` read them here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from .errors import ConfigError

#: names of FSDP2 as a stage's division over members: gathered for each microbatch, or once a step
FSDP_KEPT = "fsdp-kept"
FSDP = ("fsdp", FSDP_KEPT)
#: most slices of a sequence, and parts of a slice
_MOST_SLICES = 65_536


class _Option(NamedTuple):
    """How an option is read."""

    #: makes the value from a given one, which may be text
    kind: Callable[[Any], Any]
    allows: Callable[[Any], bool]
    #: text of the error if the value is not allowed
    rule: str
    #: whether it has a meaning only if there are several replicas
    of_replicas: bool
    #: arguments of the option of the command line
    typed: Mapping[str, Any]


def _option(
    usual: Any, kind: Callable[[Any], Any], allows: Callable[[Any], bool], rule: str, of_replicas: bool, **typed: Any
) -> Any:
    return field(default=usual, metadata={"option": _Option(kind, allows, rule, of_replicas, typed)})


def _sizes(said: int | str | None) -> tuple[int, ...]:
    """Read the cut of each sequence: sizes of its slices, in parts of the sequence.

    >>> _sizes("4"), _sizes("8,6,5,4")
    ((1, 1, 1, 1), (8, 6, 5, 4))
    """
    if said is None:
        return (1,)
    sizes = tuple(int(part) for part in str(said).split(","))
    return (1,) * min(sizes[0], _MOST_SLICES + 1) if len(sizes) == 1 else sizes


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How training is divided beyond the stages of a schedule."""

    #: number of replicas of the pipeline, with gradients that are summed; see `replicating.py`
    replicas: int = _option(
        1, int, lambda count: count > 0, "must be a whole number of at least 1", False,
        least=1, help="replicas of the pipeline, which share the workers (1)",
    )  # fmt: skip
    #: 1 if only the owner of a parameter keeps its optimizer state and updates it (ZeRO stage 1)
    zero: int = _option(
        0, int, lambda stage: stage in (0, 1), "must be 0, or 1 to divide optimizer states among replicas; take 1",
        True, least=0, help="1: divide optimizer states among the replicas (0)",
    )  # fmt: skip
    #: largest bucket of gradients in MiB
    bucket: float = _option(
        25.0, float, lambda size: 0 < size < float("inf"), "must be a size in MiB above 0; take 25",
        True, metavar="MIB", help="largest part of gradients that replicas exchange at once (25)",
    )  # fmt: skip
    #: the workers with numbers far apart: of each pipeline, or of each stage
    spread: str = _option(
        "pipelines", str, lambda what: what in ("pipelines", "stages"),
        "must be pipelines, each over all hosts, or stages, each pipeline on as few hosts as can be; take stages",
        True, help="stages: put the replicas of a stage far apart, not each pipeline (pipelines)",
    )  # fmt: skip
    #: sizes of the slices of a sequence, in parts of it. Each slice of a microbatch has an index; see `slicing.py`
    slices: tuple[int, ...] = _option(
        (1,), _sizes, lambda sizes: 1 <= min(sizes) and max(*sizes, len(sizes)) <= _MOST_SLICES,
        f"must be a number from 1 to {_MOST_SLICES}, or sizes, such as 8,6,5,4",
        False, metavar="K", help="cut sequences into K slices, or sizes such as 8,6,5,4 (1)",
    )  # fmt: skip

    @classmethod
    def taken_from(cls, parameters: dict[str, Any], own: Collection[str]) -> Parallelism:
        """Take the options out of a schedule's parameters, except the names in `own`.

        Raises:
            ConfigError: an option has an impossible value, or is of replicas, and there is one.
        """
        read = {name: _read(name, parameters.pop(name)) for name in OPTIONS if name in parameters.keys() - own}
        made = cls(**{name: value for name, (_, value) in read.items()})
        for name in EXCHANGE if made.replicas == 1 else ():
            if getattr(made, name) != getattr(cls, name):
                rule = "is of replicas, and there is one; take replicas 2, or leave it out"
                raise ConfigError(f"{name} {read[name][0]}: {rule}")
        return made


def _read(name: str, said: Any) -> tuple[Any, Any]:
    """Return an option as it was given, and its value."""
    option = OPTIONS[name]
    try:
        found = option.kind(said)
        is_right = option.allows(found) and (option.kind is not int or str(found) == str(said))
    except (TypeError, ValueError, OverflowError):
        is_right = False
    if not is_right:
        raise ConfigError(f"{name} {said}: {option.rule}")
    return said, found


#: the options by name, in the order of their fields
OPTIONS: Mapping[str, _Option] = {each.name: each.metadata["option"] for each in fields(Parallelism)}
#: how replicas exchange gradients, and where they are
EXCHANGE = tuple(name for name, option in OPTIONS.items() if option.of_replicas)
REPLICAS = ("replicas", *EXCHANGE)


def with_parallelism(parameters: Mapping[str, Any] | None, **said: Any) -> Mapping[str, Any] | None:
    """Return a schedule's parameters with the options that are given and not default."""
    found = {name: said[name] for name in OPTIONS if said.get(name) not in (None, getattr(Parallelism, name))}
    return {**(parameters or {}), **found} if found else parameters
