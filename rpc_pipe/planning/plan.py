"""A plan as a value; `rpc-pipe plan` writes it, `run --plan` and `Pipeline(plan=...)` take it. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..system.files import DAMAGED, read_json
from .json_fields import from_json_value, json_field, to_json_value


@dataclass(frozen=True)
class Plan:
    """A schedule and a cut, with their predicted time and memory."""

    schedule: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    #: blocks of each stage
    cut: tuple[int, ...] = ()
    num_microbatches: int = 0
    #: stages that recompute their activations
    recompute: tuple[int, ...] = ()
    predicted_ms: float = 0
    #: peak bytes of the worker that holds most
    predicted_memory: float = field(default=0, metadata=json_field("predicted_memory_mb", 1e6))
    #: idle share of the workers' time
    bubble: float = 0
    num_workers: int = 0
    #: peak bytes, and milliseconds of compute in a step
    memory_by_worker: tuple[float, ...] = field(default=(), metadata=json_field("memory_by_worker_mb", 1e6))
    busy_by_worker: tuple[float, ...] = field(default=(), metadata=json_field("busy_by_worker_ms"))
    #: payloads between workers in a step
    messages: int = 0
    #: the measured model's name and the bytes of each stage's weights, to notice another model
    model: str = ""
    weights_by_stage: tuple[float, ...] = field(default=(), metadata=json_field("weights_by_stage_mb", 1e6))
    #: of a searched program: workers by route and stage; routes by microbatch; by worker its actions in order, as text
    placement: tuple[tuple[int, ...], ...] = ()
    routes: tuple[int, ...] = ()
    program: tuple[str, ...] = field(default=(), repr=False)
    #: `balanced`: unequal microbatches are put into a quick order
    microbatch_order: str = "given"
    #: how many processes are one worker, and how they share its stages; `num_workers` counts processes then
    members: int = 1
    shard: str = ""
    reduce: str = "step"

    def __post_init__(self) -> None:
        if min(self.cut, default=0) < 1:
            raise ValueError("cut must list how many blocks each stage has")
        if self.num_microbatches < 1:
            raise ValueError("num_microbatches must be a whole number of at least 1")

    @property
    def name(self) -> str:
        """The schedule with its parameters, as text."""
        shared = {key: value for key, value in self.sharing.items() if key != "reduce"}
        return schedule_label(self.schedule, {**self.parameters, **shared}, self.recompute)

    @property
    def sharing(self) -> dict[str, Any]:
        """The options that make several processes one worker; none if each is one."""
        count = self.members
        return {} if count == 1 else {"members": count, "shard": self.shard, "reduce": self.reduce}

    @property
    def schedule_options(self) -> dict[str, Any]:
        """The schedule's parameters as `Pipeline` takes them, recomputation included."""
        return with_recompute(self.parameters, self.recompute)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; memory in megabytes."""
        content: dict[str, Any] = to_json_value(self)
        return content


def with_recompute(parameters: Mapping[str, Any], stages: Sequence[int]) -> dict[str, Any]:
    """Return a schedule's parameters with `recompute` for these stages."""
    return {**parameters, **({"recompute": "+".join(map(str, stages))} if stages else {})}


def schedule_label(schedule: str, parameters: Mapping[str, Any], recompute: Sequence[int] = ()) -> str:
    """Return a schedule with its parameters, as text."""
    bare = {key for key, value in parameters.items() if isinstance(value, str) and key != "slices"}
    said = [value if key in bare else f"{key}={value}" for key, value in parameters.items()]
    said += [f"{key}={stages}" for key, stages in with_recompute({}, recompute).items()]
    return f"{schedule} {','.join(said)}".rstrip()


def read_plan(source: str | Path | Mapping[str, Any] | Plan) -> Plan:
    """Return the plan in a value, a mapping or a file; of several the best, which comes first.

    Raises:
        ConfigError: it is no plan.
    """
    if isinstance(source, Plan):
        return source
    if not isinstance(source, (str, Path, Mapping)):
        raise ConfigError(f"plan {source!r}: must be a plan of rpc-pipe plan, its file, or the file's contents")
    where = "plan" if isinstance(source, Mapping) else f"plan {source}"
    content: Any = source if isinstance(source, Mapping) else read_json(Path(source), where)
    if isinstance(content, Mapping) and "plans" in content and not content["plans"]:
        raise ConfigError(f"{where}: holds no plan that fits; rpc-pipe plan says what would")
    try:
        found: Plan = from_json_value(Plan, content["plans"][0] if "plans" in content else content)
        return found
    except DAMAGED as error:
        needs = "it must have schedule, cut and num_microbatches"
        raise ConfigError(f"{where}: is no plan ({type(error).__name__}: {error}); {needs}") from None
