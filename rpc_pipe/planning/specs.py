"""Making a spec from the name or file of a schedule and its parameters. Loads without torch."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ..dependency import ConfigError, Order, Spec, schedule_errors
from ..dependency.declared import NO_PARAMETERS, Parallelism
from ..model.sharding import Sharing
from ..schedules import SCHEDULES, name_of

#: a schedule as `Pipeline` and the command line take it
ScheduleLike = str | type[Spec]
#: most forwards of a worker in a step: it lists its actions
MAX_FORWARDS = 20_000_000
#: most stages: each is priced by itself
MAX_STAGES = 1_000_000

#: options of `Training` that some features exclude
_OF_TRAINING = ("accumulate", "deferred_batch_norm", "ema_decay", "log_grad_norm", "post_validation")


def find_schedule(schedule: ScheduleLike) -> type[Spec]:
    """Return the spec class for a name, `path/to/file.py:ClassName`, torch's `path/to/file.csv`, a plan or a class.

    Raises:
        ConfigError: there is none; the text offers the nearest name.
    """
    if isinstance(schedule, type) and issubclass(schedule, Spec):
        return schedule
    if not isinstance(schedule, str):
        raise ConfigError(f"schedule {schedule!r}: must be the name of one, or a subclass of Spec")
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    if schedule.endswith((".csv", ".json")):
        from .listed_schedule import import_csv, read_program

        return import_csv(schedule) if schedule.endswith(".csv") else read_program(schedule)
    path, _, name = schedule.rpartition(":")
    if path.endswith(".py") or schedule.endswith(".py"):
        from ..system.load_module import load_schedule

        return load_schedule(schedule, path or schedule, name)
    near = difflib.get_close_matches(schedule.lower(), SCHEDULES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = f"known are {', '.join(SCHEDULES)}; or path/to/file.py:ClassName, or torch's path/to/file.csv"
    raise ConfigError(f"schedule {schedule!r}: {hint}{known}")


def make_spec(
    schedule: ScheduleLike,
    num_workers: int,
    num_microbatches: int,
    parameters: Mapping[str, Any] | None = None,
    slices: int | str | None = None,
) -> Spec:
    """Make the spec of a schedule; parameters may be text, as typed after `--set`.

    Every schedule that does not recompute by itself takes `recompute`: `all`, `none`, or stages such as `0+1`. Every
    schedule takes the options of replicas in `Parallelism`; most take `slices`, as below.

    Args:
        slices: into how many slices each sequence is cut, such as `4`, or their sizes in parts, such as `8,6,5,4`.
            The `num_microbatches` of such a spec counts slices.

    Raises:
        ConfigError: an impossible number or parameter.
    """
    cls = find_schedule(schedule)
    name = schedule if isinstance(schedule, str) else cls.__name__
    if not cls.__init__.__code__.co_filename.startswith("<"):  # a generated __init__ has a name like <string>
        rule = f"{cls.__name__} must not define __init__; a parameter is an attribute with a type, as extra: int = 1"
        raise ConfigError(f"schedule {name}: {rule}")
    known = parameter_types(cls)
    if not isinstance(parameters, Mapping | None):
        raise ConfigError(f"schedule_options {parameters!r}: must be a dict, such as {{'recompute': 'all'}}")
    parameters = {"slices": slices, **(parameters or {})}
    parallelism = Parallelism.taken_from(parameters, own=known)
    if parallelism.replicas > max(1, num_microbatches):
        raise ConfigError(f"replicas {parallelism.replicas}: needs as many microbatches (got {num_microbatches})")
    recomputed = frozenset() if "recompute" in known else _read_stages(parameters.pop("recompute", "none"))
    whole, sizes = num_microbatches, parallelism.slices
    num_microbatches *= len(sizes)
    cls = _transformed(cls, name, recomputed, parallelism, sizes)
    values = _read_parameters(cls, name, parameters)
    with schedule_errors():
        spec = cls(num_workers=num_workers, num_microbatches=num_microbatches, **values)
        # Both are read before the schedule is checked.
        num_stages, _ = spec.num_stages, spec.takes_steps
        if not isinstance(num_stages, int):
            raise TypeError(f"num_stages is {num_stages!r}; must be a whole number")
    asked = "".join(f" with {key}={value}" for key, value in values.items())
    if recomputed and max(recomputed) >= num_stages:
        raise ConfigError(f"recompute {max(recomputed)}: schedule {name}{asked} has stages 0 to {num_stages - 1}")
    if not 1 <= num_stages <= MAX_STAGES:
        bound = "must be at least 1" if num_stages < 1 else f"the most are {MAX_STAGES}"
        raise ConfigError(f"schedule {name}{asked}: has {num_stages} stages; {bound}")
    if (a_worker := -(-num_stages // num_workers)) * num_microbatches > MAX_FORWARDS:
        counted = "slices of microbatches" if num_microbatches > whole else "microbatches"
        forwards = f"{a_worker} stages times {num_microbatches} {counted}"
        raise ConfigError(f"schedule {name}{asked}: {forwards} are more than {MAX_FORWARDS} forwards of a worker")
    return spec


def _transformed(
    cls: type[Spec], name: str, recomputed: frozenset[int] | None, parallelism: Parallelism, sizes: tuple[int, ...]
) -> type[Spec]:
    """Return a schedule over slices of sequences, with recomputation, on replicas."""
    option = "slices"
    try:
        if len(sizes) > 1:
            from ..dependency.slicing import sliced

            cls = sliced(cls, sizes)
        option = "recompute"
        if recomputed != frozenset():
            from ..dependency.recomputing import recomputing

            cls = recomputing(cls, recomputed)
        option = f"replicas {parallelism.replicas}"
        if parallelism.replicas > 1:
            from ..dependency.replicating import replicated

            cls = replicated(cls, parallelism)
    except ConfigError as error:
        raise ConfigError(f"{option}: schedule {name} {error}") from None
    return cls


def _read_parameters(cls: type[Spec], name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a schedule with the types that it declares."""
    known = parameter_types(cls)
    for key in (key for key in parameters if key not in known):
        bare = key in vars(cls) and not key.startswith("_") and not callable(vars(cls)[key])
        advice = f"; write {key}: {type(vars(cls)[key]).__name__} = {vars(cls)[key]!r}" if bare else ""
        raise ConfigError(f"{key}: is no parameter of schedule {name}; it has {', '.join(known) or 'none'}{advice}")
    return {key: typed_parameter(name, key, value, known[key]) for key, value in parameters.items()}


def _read_stages(said: Any) -> frozenset[int] | None:
    """Read which stages recompute; None: all."""
    if said in ("all", "none", ""):
        return None if said == "all" else frozenset()
    try:
        stages = frozenset(map(int, said.split("+") if isinstance(said, str) else said))
    except (TypeError, ValueError, OverflowError):
        stages = frozenset([-1])
    if min(stages, default=0) < 0:
        raise ConfigError(f"recompute={said}: must be all, none or stages, such as 0+1")
    return stages


_type_hints: Any = cache(typing.get_type_hints)


def parameter_types(cls: type[Spec]) -> dict[str, Any]:
    """Return the schedule's parameters with their types."""
    hints = _type_hints(cls)
    own = (parameter.name for parameter in dataclasses.fields(cls))
    return {name: hints[name] for name in own if name not in NO_PARAMETERS}


def refuse_job(
    spec: Spec, sharing: Sharing, order: Order | None, training: Any = None, job: Any = None, is_launched: bool = True
) -> None:
    """Refuse options that cannot be combined, or not with the schedule.

    Args:
        training, job: a `Training` and a `Job`; None: not known yet.
        is_launched: whether `rpc-pipe run` has started the job's processes.

    Raises:
        ConfigError: there is such a pair.
    """
    schedule = f"schedule={name_of(spec)}"
    zero = spec.parallelism.zero
    given = {
        "asynchronous": "" if spec.synchronous else schedule,
        "updates in parts": "" if spec.takes_steps else schedule,
        "members": f"members={sharing.count}" if sharing.count > 1 else "",
        "order=ready": f"order={order}" if order == "ready" else "",
        "zero": f"zero={zero}" if zero else "",
        "pulled to a reference": schedule if spec.averaging_pull else "",
    }
    if training is not None:
        usual, scaler = type(training)(), training.grad_scaler
        found = {name: getattr(training, name) for name in _OF_TRAINING}
        given |= {name: f"{name}={value}" for name, value in found.items() if value and value != getattr(usual, name)}
        clipped = training.max_grad_norm is not None and not spec.takes_steps
        given["clipped by stage"] = f"max_grad_norm={training.max_grad_norm}" if clipped else ""
        given["skip_update"] = "" if training.skip_update is None else "skip_update"
        given["grad_scaler"] = "grad_scaler" if scaler is not None and scaler.is_enabled() else ""
        given["no norm"] = "" if training.measures_norm else "max_grad_norm=None"
    if job is not None and job.elastic:
        given |= {"elastic": "--elastic", "no launcher": "" if is_launched else "torchrun"}
        given["carrier"] = "" if job.transport == "zmq" else f"transport={job.transport}"
        given["one replica"] = "replicas=1" if spec.num_routes == 1 else ""
    if sum(map(bool, given.values())) > 1:
        from ..dependency.crossings import refuse_together

        refuse_together(given)


def typed_parameter(schedule: str, key: str, value: Any, wanted: Any) -> Any:
    """Return a parameter of a schedule that may have been typed, as a value of its type.

    Raises:
        ConfigError: its text is none of that type.
    """
    if not isinstance(value, str):
        return value
    choices = typing.get_args(wanted)
    if typing.get_origin(wanted) is typing.Literal:
        if value in (named := {str(choice): choice for choice in choices}):
            return named[value]
        raise ConfigError(f"{key}={value}: schedule {schedule} takes {', '.join(named)}")
    types = [kind for kind in choices or (wanted,) if kind is not type(None)]
    for kind in types:
        if kind is not bool:
            with suppress(ValueError):
                return kind(value)
        elif value.lower() in ("true", "false"):
            return value.lower() == "true"
    names = " or ".join(kind.__name__ for kind in types)
    raise ConfigError(f"{key}={value}: schedule {schedule} takes {names}")
