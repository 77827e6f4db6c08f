"""A plan as a value; `rpc-pipe plan` writes it, `run --plan` and `Pipeline(plan=...)` take it. Loads without torch.

Plans and profiles are written as JSON by their fields, and read back with their types checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ..dependency import ConfigError, Kind
from ..system.files import DAMAGED, read_json

_hints: Any = cache(get_type_hints)
#: counts and indices are below this
_MOST = 2**31
#: times and sizes are, so that sums and products of them are finite
_MOST_FLOAT = 1e100


def json_field(name: str, unit: float = 1) -> dict[str, Any]:
    """Return the metadata of a field with another name in JSON, or another unit, such as 1e6 for megabytes."""
    return {"name": name, "unit": unit}


def to_json_value(value: Any, unit: float = 1) -> Any:
    """Return a dataclass and its contents as JSON values. Keys that are kinds become letters."""
    if is_dataclass(value):
        return {_name(each): to_json_value(getattr(value, each.name), _unit(each)) for each in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, Kind) for key in value):  # values by kind are milliseconds
        return {key.letter: round(part, 6) for key, part in value.items()}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json_value(part, unit) for part in value]
    return value if unit == 1 else value / unit


def from_json_value(kind: Any, value: Any, name: str = "", unit: float = 1) -> Any:
    """Return the value of type `kind` that `to_json_value` has written and a user may have edited.

    Args:
        name: its name in JSON; empty: it is the outermost value, which may have other keys besides its fields.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it has another type, or lacks a field.
    """
    if is_dataclass(kind):
        names = {_name(each): each for each in fields(kind)}
        _refuse_no_object(name, value)
        if name and (unknown := value.keys() - names.keys()):
            raise TypeError(f"{name} has no {min(unknown)}: known are {', '.join(names)}")
        lacking = {each.name for each in names.values() if each.default is each.default_factory is MISSING}
        there = [(key, each) for key, each in names.items() if key in value or each.name in lacking]
        hints = _hints(kind)
        found = {each.name: from_json_value(hints[each.name], value[key], key, _unit(each)) for key, each in there}
        return kind(**found)  # type: ignore[operator]
    origin, (first, *rest) = get_origin(kind), (*get_args(kind), None)
    if origin is Mapping:
        _refuse_no_object(name, value)
        of_key = Kind.of if first is Kind else first
        return {of_key(key): from_json_value(rest[0], part, name) for key, part in value.items()}
    if origin is not None:
        if not isinstance(value, Sequence) or (first is int and not all(map(_is_whole, value))):
            raise ValueError(f"{name} must be a list of {'whole numbers' if first is int else 'values'}")
        parts = [from_json_value(first, part, name, unit) for part in value]
        return tuple(parts) if origin is tuple else parts
    if kind is int and not _is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 0")
    if kind is float and not (isinstance(value, (int, float)) and 0 <= value < _MOST_FLOAT):
        raise ValueError(f"{name} {value!r} must be a number, at least 0 and finite")
    return value if kind is Any else kind(value) if unit == 1 else unit * kind(value)


def _refuse_no_object(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} {value!r} must be an object, such as {{...}}")


def _name(of: Field[Any]) -> str:
    return str(of.metadata.get("name", of.name))


def _unit(of: Field[Any]) -> float:
    return float(of.metadata.get("unit", 1))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST


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
        if min(found.cut, default=0) < 1:
            raise ValueError("cut must list how many blocks each stage has")
        if found.num_microbatches < 1:
            raise ValueError("num_microbatches must be a whole number of at least 1")
        return found
    except DAMAGED as error:
        needs = "it must have schedule, cut and num_microbatches"
        raise ConfigError(f"{where}: is no plan ({type(error).__name__}: {error}); {needs}") from None
