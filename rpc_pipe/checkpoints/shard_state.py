"""The state of a shard, by the unsplit model's names, and how the shards of another cut take it up.

Tensors of an optimizer's state are named as in torch's flattened state: `state.<parameter>.<key>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dependency import ConfigError
from ..workers.compute.sequences.slices import plain_name
from ..workers.compute.shard import Shard
from . import json_values
from .json_values import decoded, encoded
from .scheduler_states import as_in, by_group

if TYPE_CHECKING:
    from ..workers.actor import WorkerActor
    from ..workers.compute.parts.members import Members

_AVERAGE, _HELD, _PART, _SUMS, _BUFFER = "average.", "gradient.", "gradient/", "statistics.", "buffer/"
#: options of a group that change torch's way to compute, not the result
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def shares(actor: WorkerActor) -> int:
    """Return how many members of a worker have separate buffers, as replicas have: they see different rows."""
    return 1 if actor.members is None else actor.members.shares


def column(actor: WorkerActor, route: int) -> int:
    """Return the number of a route's rows among the rows of all routes and members."""
    return route * shares(actor) + (0 if actor.members is None else actor.members.part)


def of_route(number: int, name: str) -> str:
    """Return the name of a tensor that each route has separately."""
    return f"route{number}.{name}"


def model_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the shard's parameters and buffers themselves."""
    return _checked(shard.state_dict())


def own_buffers(shard: Shard, route: int) -> dict[str, Tensor]:
    """Return the shard's buffers themselves, by separate names on the second and later routes.

    Routes see other rows, so that their statistics, codebooks and moving averages differ.
    """
    weights = {parameter.data_ptr() for parameter in shard.parameters()}
    named = model_tensors(shard).items() if route else ()
    return {f"{_BUFFER}{route}.{name}": tensor for name, tensor in named if tensor.data_ptr() not in weights}


def buffer_of(key: str) -> tuple[int, str]:
    """Return the route and the name of a buffer as `own_buffers` names it; route 0 of another tensor."""
    route, _, name = key.removeprefix(_BUFFER).partition(".")
    return (int(route), name) if key.startswith(_BUFFER) else (0, key)


def evaluated_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the tensors that the shard evaluates with."""
    return _checked(shard.evaluated_state_dict())


def _checked(state: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name}: must be a tensor in a checkpoint, and is a {type(tensor).__name__}")
        found[plain_name(name)] = tensor
    return found


def state_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state themselves."""
    found = (json_values.parts(key, value) for key, value, _ in _state(shard) if isinstance(value, Tensor))
    return {name: part for each in found for name, part in each}


def optimizer_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state, the weights' average and gradients kept for later themselves."""
    averages = {} if shard.updating.average is None else shard.updating.average.tensors
    found = {f"{_AVERAGE}{name}": tensor for name, tensor in averages.items()}
    return state_tensors(shard) | found | held_tensors(shard)


def held_tensors(shard: Shard, route: int = 0) -> dict[str, Tensor]:
    """Return the gradients, and the sums of batch normalisations, kept for later themselves.

    If several stages or routes hold a parameter, each has a part; the first part has the parameter's name.
    """
    stage, found = shard.stage, {}
    for name, tensor in shard.updating.held.items():
        is_first = route == 0 and stage == min(shard.slice.shared.get(name, (stage,)))
        found[f"{_HELD}{name}" if is_first else f"{_PART}{stage}/{route}.{name}"] = tensor
    return found | {f"{name}/{route}" if route else name: tensor for name, tensor in _sums(shard).items()}


def _sums(shard: Shard) -> dict[str, Tensor]:
    """Return the sums of batch normalisations since the last update, if that may be some steps ago."""
    found = shard.statistics.sums() if shard.updating.training.accumulate > 1 else []
    names = {tensor.data_ptr(): name for name, tensor in model_tensors(shard).items()}
    named = [(names.get(mean.data_ptr()), sums) for mean, sums in found]
    return {f"{_SUMS}{name}.{key}": tensor for name, sums in named if name for key, tensor in sums.items()}


def described(shard: Shard, members: Members | None) -> dict[str, Any]:
    """Return the rest of the state, as JSON; of members, with the state that each has alone."""
    found = _described(shard)
    if members is None or not members.alone:
        return found
    planes = members.exchange(found)
    for number, group in enumerate(found["groups"]):
        every = [name for each in planes for name in each["groups"][number]["parameters"]]
        group["parameters"] = list(dict.fromkeys(every))
    if "plain" in found:
        found["plain"] = {key: value for each in planes for key, value in each["plain"].items()}
        found["on_host"] = list(dict.fromkeys(key for each in planes for key in each["on_host"]))
    return found


def _described(shard: Shard) -> dict[str, Any]:
    optimizer, scheduler, updating = shard.optimizer, shard.updating.lr_scheduler, shard.updating
    if optimizer is None:
        return {"updates": 0, "groups": []}
    names = {parameter: name for name, parameter in shard.named_parameters()}
    what = f"optimizer {type(optimizer).__name__}"
    return {
        "updates": updating.count,
        "weight": float(updating.weight),
        "scale": [updating.scale.scale, updating.scale.streak] if updating.scale.enabled else None,
        "averaged": None if updating.average is None else updating.average.num_updates,
        "optimizer": type(optimizer).__name__,
        "groups": [
            {
                "parameters": [names[parameter] for parameter in group["params"]],
                "options": {key: encoded(each, f"{what}: {key}") for key, each in group.items() if key not in _HOW},
            }
            for group in optimizer.param_groups
        ],
        "plain": {
            key: encoded(value, f"{what}: {key}") for key, value, _ in _state(shard) if not isinstance(value, Tensor)
        },
        "whole": json_values.forms(((key, value) for key, value, _ in _state(shard)), what),
        # Such as Adam's count of steps, which stays on the CPU.
        "on_host": [key for key, value, p in _state(shard) if isinstance(value, Tensor) and value.device != p.device],
        "scheduler": None if scheduler is None else encoded(scheduler.state_dict(), type(scheduler).__name__),
        "scheduled": type(scheduler).__name__,
        "accumulate": updating.training.accumulate,
    }


def _state(shard: Shard) -> Iterator[tuple[str, Any, nn.Parameter]]:
    """Yield (name, value, parameter) of all that the optimizer remembers."""
    if shard.optimizer is not None:
        for name, parameter in shard.named_parameters():
            for key, value in shard.optimizer.state.get(parameter, {}).items():
                yield f"state.{name}.{key}", value, parameter


class Stages:
    """The descriptions of a checkpoint's stages.

    Args:
        stages: as `described`, by stage; by stage and route where several routes own parts of a stage.
        tensors: names of all tensors of optimizers.
        read: gives such tensors by name; of a tensor that members share, the part here.
    """

    def __init__(
        self,
        stages: Mapping[str, dict[str, Any]],
        tensors: list[str],
        read: Callable[[Iterable[str], Mapping[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        self._stages, self.read = stages, read
        #: of each parameter that was trained, its stage and the number of its group there
        self._groups = {
            name: (stage, number)
            for stage, each in stages.items()
            for number, group in enumerate(each["groups"])
            for name in map(plain_name, group["parameters"])
        }
        every = stages.values()
        self._plain = {plain_name(key): value for each in every for key, value in each.get("plain", {}).items()}
        #: of tensors that consist of plain ones, how
        self._whole = {plain_name(key): form for each in every for key, form in each.get("whole", {}).items()}
        self._on_host = {plain_name(key) for each in every for key in each.get("on_host", ())}
        #: the values that all trained stages have in common
        self._told = next((each for each in stages.values() if each["groups"]), {})
        #: how often the weights had been updated
        self.updates = max(int(each["updates"]) for each in stages.values())
        self._beside = {key for key in tensors if not key.startswith("state.")}
        #: the parameter of each gradient, or part of one, that is kept for later
        self._held = {key: key.partition(".")[2] for key in tensors if key.startswith((_HELD, _PART))}
        #: of each parameter, the state of its optimizer
        self._state: dict[str, list[str]] = {}
        for key in {*map(json_values.of_part, set(tensors) - self._beside), *self._plain}:
            self._state.setdefault(key.removeprefix("state.").rpartition(".")[0], []).append(key)

    def wanted(self, shard: Shard, route: int, num_routes: int) -> list[str]:
        """Return the names of the tensors that `shard` needs, which is of one of `num_routes`."""
        owned = shard.updating.owned
        is_trained = shard.optimizer is not None or owned is not None
        on_this = [name for name, _ in shard.named_parameters() if is_trained]
        state = [key for name in on_this if owned is None or name in owned for key in self._state.get(name, [])]
        beside = [*self._of_sums(shard, route, num_routes), *(_AVERAGE + name for name in on_this)]
        held = [key for key, name in self._held.items() if name in on_this]
        return [
            *(name for key in state if key not in self._plain for name in json_values.names(self._whole.get(key), key)),
            *(key for key in beside if key in self._beside),
            *(key for key in held if self._takes(key, shard, num_routes) == (shard.stage, route)),
        ]

    def _laid_out(self, shard: Shard) -> Mapping[str, Tensor]:
        """Return the parameter of each tensor, which is laid out as that is."""
        named = dict(shard.named_parameters())
        held = {key: named[name] for key, name in self._held.items() if name in named}
        state = {key: p for name, p in named.items() for key in (*self._state.get(name, ()), _AVERAGE + name)}
        return held | state

    def _of_sums(self, shard: Shard, route: int, num_routes: int) -> dict[str, Tensor]:
        """Return by key the sums that a route resumes from; the first also takes the sums of missing routes."""
        parts = [(key, *key.partition("/")[::2]) for key in self._beside if key.startswith(_SUMS)]
        return {
            key: sums
            for name, sums in _sums(shard).items()
            for key, of, number in parts
            if of == name and route == (int(number or 0) if int(number or 0) < num_routes else 0)
        }

    def _takes(self, key: str, shard: Shard, num_routes: int) -> tuple[int, int]:
        """Return the stage and route that take up a gradient kept for later: the same ones, so that sums keep their
        order; if these do not hold the parameter here, the first ones."""
        stages = shard.slice.shared.get(self._held[key], (shard.stage,))
        if key.startswith(_PART):
            stage, route = map(int, key.removeprefix(_PART).partition(".")[0].split("/"))
            if stage in stages and route < num_routes:
                return stage, route
        return min(stages), 0

    def prepare(self, shard: Shard, route: int, num_routes: int = 1) -> Callable[[], None]:
        """Check that training of `shard`, of `num_routes` routes, can resume from here; return the call that restores.

        Raises:
            ConfigError: it has another optimizer, or groups other parameters together.
        """
        if not self._groups:  # there is nothing more
            return lambda: None
        accumulate, was = shard.updating.training.accumulate, self._told.get("accumulate")
        if self._held and was not in (None, accumulate) and not self._told.get("weight"):  # else sums, not means
            raise ConfigError(f"accumulate={accumulate}: gradients in the checkpoint are divided by {was}; keep it")
        tensors = self.read(self.wanted(shard, route, num_routes), self._laid_out(shard))
        own = {key: each for key, each in tensors.items() if key in self._beside}
        beside = partial(self._apply_beside, shard, own, self._of_sums(shard, route, num_routes))
        optimizer, owned = shard.optimizer, shard.updating.owned
        if optimizer is None:  # nothing is trained here; the loss may be computed here, though
            return beside
        names = {parameter: name for name, parameter in shard.named_parameters()}
        groups, origins = [], []
        for number, group in enumerate(optimizer.param_groups):
            found = self._origins(optimizer, [names[parameter] for parameter in group["params"]])
            has = (stage for stage, each in self._stages.items() if len(each["groups"]) > number)
            origins.append(found[0] if found else (next(has, next(iter(self._stages))), number))
            groups.append((group, self._options(found[0]) if found else {}))
        in_group = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        state = {
            parameter: {
                key.rpartition(".")[2]: self._value(key, tensors, parameter, in_group.get(parameter, {}))
                for key in self._state.get(name, [])
            }
            for parameter, name in names.items()
            if name in self._groups and (owned is None or name in owned)
        }
        scheduler = self._scheduler(shard, origins)

        def apply() -> None:
            beside()
            for group, options in groups:
                for key, value in options.items():
                    if isinstance(own := group.get(key), Tensor):  # the user, or a compiled step, holds on to it
                        own.fill_(float(value))
                    else:
                        group[key] = value
            optimizer.state.clear()
            for parameter, each in state.items():
                optimizer.state[parameter] = each
            if shard.updating.lr_scheduler is not None:
                shard.updating.lr_scheduler.load_state_dict(as_in(shard.updating.lr_scheduler.state_dict(), scheduler))

        return apply

    def _origins(self, optimizer: Optimizer, names: list[str]) -> list[tuple[str, int]]:
        """Return the former groups of these parameters, which are in one group here."""
        for name in names:
            if name not in self._groups:
                raise ConfigError(f"{name} is trained here, and was not when the checkpoint was written")
        found = list(dict.fromkeys(self._groups[name] for name in names))
        for stage, _ in found:
            was = self._stages[stage]["optimizer"]
            if was != type(optimizer).__name__:
                raise ConfigError(f"optimizer {type(optimizer).__name__}: the checkpoint is of {was}; go on with that")
        for other in found[1:]:
            if self._options(other) != self._options(found[0]):
                had = f"{self._options(found[0])} and {self._options(other)}"
                raise ConfigError(f"optimizer: parameters of one group had other options, {had}; divide them as before")
        return found

    def _options(self, origin: tuple[str, int]) -> dict[str, Any]:
        stage, number = origin
        return {key: decoded(each) for key, each in self._stages[stage]["groups"][number]["options"].items()}

    def _value(self, key: str, tensors: Mapping[str, Tensor], parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
        if key in self._plain:
            return decoded(self._plain[key])
        on_host = key in self._on_host
        if key.endswith(".step"):  # on torch's device for it, not on the device that wrote the checkpoint
            on_host = not (group.get("fused") or group.get("capturable"))
        found = json_values.joined(self._whole.get(key), key, tensors)
        return found if on_host else found.to(parameter.device)

    def _scheduler(self, shard: Shard, origins: list[tuple[str, int]]) -> Any:
        """Return the state of this stage's scheduler, which may have groups of several stages; None: there is none."""
        if shard.updating.lr_scheduler is None:
            return None
        if any(self._stages[stage].get("scheduler") is None for stage, _ in origins):
            raise ConfigError("lr_scheduler: the checkpoint was written without one; leave it out")
        own = type(shard.updating.lr_scheduler).__name__
        if (was := self._told.get("scheduled", own)) != own:
            raise ConfigError(f"lr_scheduler {own}: the checkpoint is of {was}; go on with that")
        former = [(self._stages[stage], number) for stage, number in origins]
        return by_group([(decoded(each["scheduler"]), number, len(each["groups"])) for each, number in former])

    def _apply_beside(self, shard: Shard, tensors: Mapping[str, Tensor], of_sums: Mapping[str, Tensor]) -> None:
        """Set the state outside the optimizer: the average of the weights, sums of batch normalisations, gradients of
        steps since the last update, and the scale of the loss."""
        for sums in of_sums.values():
            sums.zero_()
        for key, sums in of_sums.items():
            sums.add_(tensors[key].to(sums.device))
        shard.statistics.hold()
        updating, scale = shard.updating, self._told.get("scale")
        if updating.scale.enabled and scale is not None:
            updating.scale.scale, updating.scale.streak = float(scale[0]), int(scale[1])
        if updating.average is not None:
            updating.average.num_updates = int(self._told.get("averaged") or 0)
            for name, average in updating.average.tensors.items():
                if _AVERAGE + name in tensors:
                    average.copy_(tensors[_AVERAGE + name])
        updating.held = {}
        for key in (key for key in self._held if key in tensors):
            name = self._held[key]
            part = tensors[key].to(updating.parameters[name].device)
            updating.held[name] = updating.held[name] + part if name in updating.held else part
        updating.weight = float(self._told.get("weight", 0.0))
        updating.restore()


def put(shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    """Make these the numbers of the shard's parameters and buffers, in place."""
    own = model_tensors(shard)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
