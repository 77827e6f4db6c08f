"""From a plan to what a pipeline is made of. Loads without torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from .listed_schedule import program_of
from .plan import Plan, read_plan
from .specs import ScheduleLike

logger = logging.getLogger(__name__)

#: a model whose stage has, relatively, so much more weights than the plan's, or less, is another
_ALIKE = 0.01

#: a plan, or what was written of it: the file or its contents
PlanLike = Plan | Mapping[str, Any] | str | Path


def followed(plan: PlanLike | None, said: Any) -> Any:
    """Return what a pipeline is to be made of: what a plan says, in the place of what was given.

    Args:
        said: a named tuple with schedule, schedule_options, num_microbatches (0: not given), num_workers and split.

    Raises:
        ConfigError: it is no plan, or it is for another number of workers, or what it says was given as well.
    """
    if plan is None:
        return said
    if said.num_microbatches or said.split is not None or said.schedule != "1f1b" or said.schedule_options:
        raise ConfigError(
            "plan: says schedule, schedule_options, num_microbatches and split; leave them out, or the plan"
        )
    found = read_plan(plan)
    if said.num_workers is not None and found.num_workers and said.num_workers != found.num_workers:
        raise ConfigError(f"num_workers {said.num_workers}: the plan is for {found.num_workers} workers")
    schedule: ScheduleLike = program_of(found) if found.program else found.schedule
    return said._replace(
        schedule=schedule,
        schedule_options=found.schedule_options,
        num_microbatches=found.num_microbatches,
        num_workers=said.num_workers or found.num_workers or None,
        split=list(found.cut),
        plan=found,
    )


def warn_of_another(plan: PlanLike | None, name: str, workers: Iterable[Mapping[tuple[int, int], Any]]) -> None:
    """Warn if a plan was made for another model; who has the stage with most weights does.

    Args:
        name: of the model that is trained.
        workers: their shards by (stage, route), of those of this process.
    """
    found = Plan("", {}, (), 0) if plan is None else read_plan(plan)
    planned = found.weights_by_stage
    heaviest = max(range(len(planned)), key=planned.__getitem__, default=-1)
    for shard in [shards[heaviest, 0] for shards in workers if (heaviest, 0) in shards]:
        held = [sum(tensor.nbytes for tensor in each) for each in (shard.parameters(), shard.buffers())]
        wanted = planned[heaviest]
        if all(abs(each - wanted) > _ALIKE * wanted for each in (held[0], sum(held))):
            logger.warning(
                "the plan was made for another model, %s, whose stage %d has %.4g MB of weights; that of this one, %s, "
                "has %.4g MB: rpc-pipe plan makes one for it",
                found.model, heaviest, wanted / 1e6, name, held[0] / 1e6,
            )  # fmt: skip
