"""A plan as a value: what `plan` writes, and `run --plan` and `Pipeline(plan=...)` take. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..dependency.files import DAMAGED, read_json

#: no plan has more microbatches, blocks or workers
_MOST = 2**31


@dataclass(frozen=True)
class Plan:
    """A schedule, a cut and what they are predicted to cost."""

    schedule: str
    parameters: Mapping[str, Any]
    #: blocks of each stage
    cut: tuple[int, ...]
    num_microbatches: int
    #: stages that recompute their activations
    recompute: tuple[int, ...] = ()
    predicted_ms: float = 0
    #: bytes of the worker that holds most
    predicted_memory: float = 0
    #: share of the workers' time that is not spent computing
    bubble: float = 0
    num_workers: int = 0
    #: bytes, and milliseconds of compute
    memory_by_worker: tuple[float, ...] = ()
    busy_by_worker: tuple[float, ...] = ()
    #: payloads between workers in a step
    messages: int = 0
    #: the name of the model that was measured, and the bytes of each stage's weights: they tell another model apart
    model: str = ""
    weights_by_stage: tuple[float, ...] = ()
    #: of a searched program: each worker's actions in order; by route and stage the worker; each microbatch's route
    program: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    placement: tuple[tuple[int, ...], ...] = ()
    routes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The schedule with its parameters."""
        return tell_name(self.schedule, self.parameters, self.recompute)

    @property
    def schedule_options(self) -> dict[str, Any]:
        """The schedule's parameters as `Pipeline` takes them, recomputation included."""
        return with_recompute(self.parameters, self.recompute)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; memory in megabytes."""
        told = {
            "schedule": self.schedule,
            "parameters": dict(self.parameters),
            "cut": list(self.cut),
            "num_microbatches": self.num_microbatches,
            "recompute": list(self.recompute),
            "predicted_ms": self.predicted_ms,
            "predicted_memory_mb": self.predicted_memory / 1e6,
            "bubble": self.bubble,
            "num_workers": self.num_workers,
            "memory_by_worker_mb": [used / 1e6 for used in self.memory_by_worker],
            "busy_by_worker_ms": list(self.busy_by_worker),
            "messages": self.messages,
            "model": self.model,
            "weights_by_stage_mb": [weights / 1e6 for weights in self.weights_by_stage],
        }
        if self.program:
            told |= {
                "placement": [list(places) for places in self.placement],
                "routes": list(self.routes),
                "program": [" ".join(row) for row in self.program],
            }
        return told


def with_recompute(parameters: Mapping[str, Any], stages: Sequence[int]) -> dict[str, Any]:
    """Return a schedule's parameters with that of recomputation on stages."""
    return {**parameters, **({"recompute": "+".join(map(str, stages))} if stages else {})}


def tell_name(schedule: str, parameters: Mapping[str, Any], recompute: Sequence[int] = ()) -> str:
    """Write a schedule with parameters that are not its defaults."""
    said = [value if isinstance(value, str) else f"{key}={value}" for key, value in parameters.items()]
    said += [f"{key}={stages}" for key, stages in with_recompute({}, recompute).items()]
    return f"{schedule} {','.join(said)}".rstrip()


def read_plan(source: str | Path | Mapping[str, Any] | Plan) -> Plan:
    """Return a plan from a value, from plain values, or from a file: the best of those that `plan` wrote.

    Raises:
        ConfigError: it is no plan.
    """
    if isinstance(source, Plan):
        return source
    where = "plan"
    told: Any = source
    if not isinstance(source, Mapping):
        where = f"plan {source}"
        told = read_json(Path(source), where)
    if isinstance(told, Mapping) and "plans" in told and not told["plans"]:
        raise ConfigError(f"{where}: holds no plan that fits; rpc-pipe plan says what would")
    try:
        return _from_plain(told["plans"][0] if "plans" in told else told)
    except DAMAGED as error:
        raise ConfigError(
            f"{where}: is no plan ({type(error).__name__}: {error}); it must have schedule, cut and num_microbatches"
        ) from None


def _from_plain(told: Mapping[str, Any]) -> Plan:
    def numbers(name: str) -> tuple[int, ...]:
        return whole(name, told.get(name, ()))

    def whole(name: str, values: Any) -> tuple[int, ...]:
        if not isinstance(values, Sequence) or not all(isinstance(v, int) and 0 <= v < _MOST for v in values):
            raise ValueError(f"{name} must be a list of whole numbers")
        return tuple(values)

    cut = numbers("cut")
    if not cut or min(cut) < 1:
        raise ValueError("cut must list how many blocks each stage has")
    count, workers = told["num_microbatches"], told.get("num_workers", 0)
    for name, value, least in (("num_microbatches", count, 1), ("num_workers", workers, 0)):
        if not isinstance(value, int) or not least <= value < _MOST:
            raise ValueError(f"{name} must be a whole number of at least {least}")
    return Plan(
        str(told["schedule"]),
        dict(told.get("parameters", {})),
        cut,
        count,
        numbers("recompute"),
        float(told.get("predicted_ms", 0)),
        1e6 * float(told.get("predicted_memory_mb", 0)),
        float(told.get("bubble", 0)),
        num_workers=workers,
        memory_by_worker=tuple(1e6 * float(used) for used in told.get("memory_by_worker_mb", ())),
        busy_by_worker=tuple(float(t) for t in told.get("busy_by_worker_ms", ())),
        messages=int(told.get("messages", 0)),
        model=str(told.get("model", "")),
        weights_by_stage=tuple(1e6 * float(weights) for weights in told.get("weights_by_stage_mb", ())),
        program=tuple(tuple(str(row).split()) for row in told.get("program", ())),
        placement=tuple(whole("placement", places) for places in told.get("placement", ())),
        routes=numbers("routes"),
    )
