"""Options of the command line that override the arguments of a script's pipelines, with a message for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..dependency import Order, Spec


class Settings(NamedTuple):
    """The arguments of `Pipeline` that the command line can override."""

    schedule: str | type[Spec]
    schedule_options: Mapping[str, Any] | None
    num_microbatches: int
    num_workers: int | None
    split: Sequence[int] | None
    order: Order | None
    device: str | None
    seed: int
    transport: str | None = None
    #: the plan that decides the other settings
    plan: Any = None
    microbatch_order: str = "given"
    members: int = 1
    shard: Any = None
    reduce: str = "step"
    compile: Any = None


class Override(Protocol):
    """The typed options, for every pipeline that is made from now on."""

    made: Callable[[Any], None]
    closing: Callable[[Any], None]

    def over(self, said: Settings) -> Settings:
        """Return the settings of a pipeline with the typed options in place of the script's."""


_overrides: Override | None = None


def install(overrides: Override | None) -> None:
    """Apply `overrides` to the pipelines of this process; None: no overrides."""
    global _overrides
    _overrides = overrides


def settle(said: Settings) -> Settings:
    """Return the settings of a new pipeline."""
    return said if _overrides is None else _overrides.over(said)


def made(pipeline: object) -> None:
    """Pass a new pipeline to the function that waits for it."""
    if _overrides is not None:
        _overrides.made(pipeline)


def closing(pipeline: object) -> None:
    """Pass a pipeline that is about to be closed to the function that waits for it."""
    if _overrides is not None:
        _overrides.closing(pipeline)
