"""The options of the command line that make a pipeline. Loads without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..dependency import ConfigError, Order, Spec, check_all
from ..dependency.pipeline_options import ROWS, Options
from ..model.cut import cut
from ..model.sharding import Sharing
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
