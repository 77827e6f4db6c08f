"""The options typed on the command line, as a new pipeline of a script asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Overrides:
    """Follows every pipeline of this process; by default a pipeline is as the script says."""

    def over(self, said: Settings) -> Settings:
        """Return the settings of a new pipeline."""
        return said

    def made(self, pipe: Any) -> None:
        """Take a pipeline that has been made."""

    def closing(self, pipe: Any) -> bool:
        """Take a pipeline that is about to be closed; return whether it stays open."""
        return False


#: of the pipelines that are made from now on
current = Overrides()
