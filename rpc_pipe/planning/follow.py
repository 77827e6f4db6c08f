"""From a plan to what a pipeline is made of. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from .listed import program_of
from .plan import Plan, read_plan
from .specs import ScheduleLike

#: a plan, or what was written of it: the file or its contents
PlanLike = Plan | Mapping[str, Any] | str | Path
#: schedule, options, number of microbatches, cut, number of workers
Asked = tuple[ScheduleLike, Mapping[str, Any] | None, int, Sequence[int] | None, int | None]


def followed(
    plan: PlanLike | None,
    schedule: ScheduleLike,
    options: Mapping[str, Any] | None,
    num_microbatches: int | None,
    split: Sequence[int] | None,
    num_workers: int | None,
) -> Asked:
    """Return what a pipeline is to be made of: what a plan says, or else what was given.

    Raises:
        ConfigError: it is no plan, or it is for another number of workers, or what it says was given as well.
    """
    if plan is None:
        if num_microbatches is None:
            raise ConfigError("num_microbatches: needed, unless a plan= says it")
        return schedule, options, num_microbatches, split, num_workers
    if num_microbatches is not None or split is not None or schedule != "1f1b" or options:
        raise ConfigError(
            "plan: says schedule, schedule_options, num_microbatches and split; leave them out, or the plan"
        )
    found = read_plan(plan)
    if num_workers is not None and found.num_workers and num_workers != found.num_workers:
        raise ConfigError(f"num_workers {num_workers}: the plan is for {found.num_workers} workers")
    named: ScheduleLike = program_of(found) if found.program else found.schedule
    count = num_workers or found.num_workers or None
    return named, found.schedule_options, found.num_microbatches, list(found.cut), count
