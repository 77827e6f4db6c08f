"""The arguments of a pipeline from a plan. Loads without torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

from ..dependency import ConfigError, Spec
from ..dependency.pipeline_options import Options
from .listed_schedule import program_of
from .plan import Plan, read_plan

logger = logging.getLogger(__name__)

#: relative difference of a stage's bytes from the plan's above which the model is another
_TOLERANCE = 0.01

#: a plan, its file, or the file's contents
PlanLike = Union["Plan", Mapping[str, Any], str, Path]


def apply_plan(options: Options) -> Options:
    """Return the options of a pipeline with the decisions of their plan.

    Raises:
        ConfigError: it is no plan, is for another number of workers, or decides a setting that was given as well.
    """
    usual = options.schedule == "1f1b" and not options.schedule_options
    if options.num_microbatches or options.split is not None or not usual:
        raise ConfigError("plan: says schedule, schedule_options, num_microbatches and split; leave one of both out")
    found = read_plan(options.plan)
    if options.num_workers is not None and found.num_workers and options.num_workers != found.num_workers:
        raise ConfigError(f"num_workers {options.num_workers}: the plan is for {found.num_workers} workers")
    shared = found.sharing
    if (given := options.members) not in (1, planned := shared.get("members", 1)):
        raise ConfigError(f"members={given}: the plan is for {planned}; leave members out")
    if shared and options.shard:
        shared["shard"] = options.shard
    schedule: str | type[Spec] = program_of(found) if found.program else found.schedule
    return replace(
        options,
        schedule=schedule,
        schedule_options=found.schedule_options,
        num_microbatches=found.num_microbatches,
        num_workers=options.num_workers or found.num_workers or None,
        split=list(found.cut),
        plan=found,
        **shared,
        microbatch_order=options.microbatch_order if found.microbatch_order == "given" else found.microbatch_order,
    )


def warn_if_other_model(plan: Plan, name: str, workers: Iterable[Mapping[tuple[int, int], Any]]) -> None:
    """Warn if a plan was made for another model. Only the worker of the stage with most weights warns.

    Args:
        name: of the model that is trained.
        workers: the shards by (stage, route) of each worker in this process.
    """
    planned = plan.weights_by_stage
    heaviest = max(range(len(planned)), key=planned.__getitem__, default=-1)
    for shard in [shards[heaviest, 0] for shards in workers if (heaviest, 0) in shards]:
        held = [sum(tensor.nbytes for tensor in each) for each in (shard.parameters(), shard.buffers())]
        wanted = planned[heaviest]
        if all(abs(each - wanted) > _TOLERANCE * wanted for each in (held[0], sum(held))):
            logger.warning(
                "the plan was made for another model, %s, whose stage %d has %.4g MB of weights; that of this one, %s, "
                "has %.4g MB: rpc-pipe plan makes one for it",
                plan.model, heaviest, wanted / 1e6, name, held[0] / 1e6,
            )  # fmt: skip
