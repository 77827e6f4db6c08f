"""The arguments of a pipeline, as typed on the command line or as a plan has them. Loads without torch."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Union

from ..dependency import ConfigError, Order, Spec, check_all
from ..dependency.pipeline_options import ROWS, Options
from ..model.sharding import Sharing, cut
from .listed_schedule import program_of
from .plan import Plan, read_plan
from .specs import make_spec, refuse_job


def workers_of(processes: int, members: int) -> int:
    """Return the number of a schedule's workers.

    Raises:
        ConfigError: the processes cannot be divided into workers of `members` each.
    """
    if processes % members:
        raise ConfigError(f"--members {members}: must divide the processes of --workers {processes}")
    return processes // members


@dataclass(frozen=True, kw_only=True, eq=False)
class PipeOptions(Options):
    """The options of the command line that make a pipeline."""

    schedule_options: dict[str, str] = field(default_factory=dict)
    num_workers: int = 2
    num_microbatches: int = 8
    device: str = "cpu"
    threads: int = 1
    steps: int = 100

    def for_pipeline(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `Pipeline`, in a job that has its transport."""
        return {name: getattr(self, name) for name in ROWS if name != "transport"}

    def spec(self, num_layers: int) -> Spec:
        """Make the spec and check it, before any worker is started.

        Raises:
            ConfigError: an impossible option.
            ScheduleError: the relation cannot run.
        """
        spec = self.of_plane()
        check_all(spec)
        cut(num_layers, spec.num_stages, self.split)
        return spec

    @property
    def run_order(self) -> Order | None:
        """The workers' order of actions; None: the schedule's preference."""
        return "fixed" if self.sharing.count > 1 else self.order

    @property
    def sharing(self) -> Sharing:
        """How many processes are one worker, and how they share its stages."""
        return Sharing(self.members, self.shard)

    def of_plane(self) -> Spec:
        """Make the spec of a pipeline with one member of each worker.

        Raises:
            ConfigError: an impossible option.
        """
        sharing = self.sharing
        workers = workers_of(self.num_workers, sharing.count)
        spec = make_spec(self.schedule, workers, sharing.microbatches(self.num_microbatches), self.schedule_options)
        refuse_job(spec, sharing, self.order)
        return spec


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
    for name in ("shard", "reduce") if shared else ():
        if (own := getattr(options, name)) != getattr(Options, name):
            shared[name] = own
    schedule: str | type[Spec] = program_of(found) if found.program else found.schedule
    said: dict[str, Any] = {name: getattr(found, name) for name in ("schedule_options", "num_microbatches")}
    if found.microbatch_order != "given":
        said["microbatch_order"] = found.microbatch_order
    said |= {"schedule": schedule, "split": list(found.cut), "plan": found, **shared}
    return replace(options, num_workers=options.num_workers or found.num_workers or None, **said)


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
