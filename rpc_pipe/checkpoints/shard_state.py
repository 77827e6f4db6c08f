"""What a shard has to remember, by the unsplit model's names, and how the shards of another cut take it up.

Tensors of an optimizer's state are named as in torch's flattened state: `state.<parameter>.<key>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dependency import ConfigError
from ..workers.compute.shard import Shard
from ..workers.compute.updating import Updating
from .json_values import decoded, encoded

#: options of a group that say how torch computes, not what
_AVERAGE, _HELD, _PART, _SUMS = "average.", "gradient.", "gradient/", "statistics."
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def of_route(number: int, name: str) -> str:
    """Return how a tensor is called that each route has of its own."""
    return f"route{number}.{name}"


def model_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the shard's parameters and buffers themselves."""
    return _checked(shard.state_dict())


def evaluated_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the tensors by which the shard evaluates."""
    return _checked(shard.evaluated_state_dict())


def _checked(state: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{name}: a checkpoint takes tensors, and get_extra_state gives a {type(tensor).__name__}"
            )
        found[name] = tensor
    return found


def state_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state themselves."""
    return {key: value for key, value, _ in _state(shard) if isinstance(value, Tensor)}


def optimizer_tensors(shard: Shard) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state, the weights' average and gradients kept for later themselves."""
    averages = {} if shard.updating.average is None else shard.updating.average.tensors
    found = {f"{_AVERAGE}{name}": tensor for name, tensor in averages.items()}
    return state_tensors(shard) | found | held_tensors(shard) | _sums(shard)


def held_tensors(shard: Shard, route: int = 0) -> dict[str, Tensor]:
    """Return the gradients kept for later themselves.

    Of a parameter that several stages or routes hold each has a part: that of the first is called by the name alone.
    """
    stage, found = shard.stage, {}
    for name, tensor in shard.updating.held.items():
        is_first = route == 0 and stage == min(shard.slice.shared.get(name, (stage,)))
        found[f"{_HELD}{name}" if is_first else f"{_PART}{stage}/{route}.{name}"] = tensor
    return found


def _sums(shard: Shard) -> dict[str, Tensor]:
    """Return what batch normalisations have summed up since the last update, if that may be some steps ago."""
    found = shard.statistics.sums() if shard.updating.training.accumulate > 1 else []
    names = {tensor.data_ptr(): name for name, tensor in shard.state_dict().items() if isinstance(tensor, Tensor)}
    named = [(names.get(mean.data_ptr()), sums) for mean, sums in found]
    return {f"{_SUMS}{name}.{key}": tensor for name, sums in named if name for key, tensor in sums.items()}


def described(shard: Shard) -> dict[str, Any]:
    """Return what else there is to remember, as JSON."""
    optimizer, scheduler, updating = shard.optimizer, shard.lr_scheduler, shard.updating
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
        # Such as Adam's count of steps, which stays on the CPU.
        "on_host": [key for key, value, p in _state(shard) if isinstance(value, Tensor) and value.device != p.device],
        "scheduler": None if scheduler is None else encoded(scheduler.state_dict(), type(scheduler).__name__),
    }


def _state(shard: Shard) -> Iterator[tuple[str, Any, nn.Parameter]]:
    """Yield (name, value, parameter) of all that the optimizer remembers."""
    if shard.optimizer is not None:
        for name, parameter in shard.named_parameters():
            for key, value in shard.optimizer.state.get(parameter, {}).items():
                yield f"state.{name}.{key}", value, parameter


class Stages:
    """What the stages of a checkpoint have described.

    Args:
        stages: as `described`, by stage or, where several own parts of it, by stage and route.
        tensors: names of all tensors of optimizers.
    """

    def __init__(self, stages: Mapping[str, dict[str, Any]], tensors: list[str]) -> None:
        self._stages = stages
        self._groups = {
            name: (stage, index)
            for stage, each in stages.items()
            for index, group in enumerate(each["groups"])
            for name in group["parameters"]
        }
        self._keys: dict[str, list[str]] = {}
        plain = [key for each in stages.values() for key in each.get("plain", {})]
        self._beside = {key for key in tensors if not key.startswith("state.")}
        #: of which parameter each gradient kept for later is, or is a part
        self._held = {key: key.partition(".")[2] for key in tensors if key.startswith((_HELD, _PART))}
        for key in (*set(tensors) - self._beside, *plain):
            self._keys.setdefault(key.removeprefix("state.").rpartition(".")[0], []).append(key)

    def wanted(self, shard: Shard, route: int, num_routes: int = 1) -> list[str]:
        """Return the names of the tensors that the optimizer of `shard` needs, which is one of `num_routes`."""
        owned = shard.updating.owned
        on_this = shard.named_parameters() if shard.optimizer is not None or owned is not None else []
        found = [key for name, _ in on_this for key in self._keys.get(name, [])
                 if self._plain(name, key) is None and (owned is None or name in owned)]  # fmt: skip
        found += [key for key in _sums(shard) if key in self._beside]
        found += [_AVERAGE + name for name, _ in on_this if _AVERAGE + name in self._beside]
        own = {name for name, _ in on_this}
        held = [key for key, name in self._held.items() if name in own]
        return found + [key for key in held if self._takes(key, shard, num_routes) == (shard.stage, route)]

    def _takes(self, key: str, shard: Shard, num_routes: int) -> tuple[int, int]:
        """Return the stage and route that take up a gradient kept for later: its own, so that sums have the same order
        as if training had not stopped, or the first if that does not hold the parameter here."""
        stages = shard.slice.shared.get(self._held[key], (shard.stage,))
        if key.startswith(_PART):
            stage, route = map(int, key.removeprefix(_PART).partition(".")[0].split("/"))
            if stage in stages and route < num_routes:
                return stage, route
        return min(stages), 0

    def _plain(self, name: str, key: str) -> dict[str, Any] | None:
        stage, _ = self._groups.get(name, (None, 0))
        plain: dict[str, Any] = {} if stage is None else self._stages[stage].get("plain", {})
        return {"value": plain[key]} if key in plain else None

    def prepare(self, shard: Shard, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """See that the optimizer of `shard` can go on from here; return what makes it.

        Args:
            tensors: those `wanted`.

        Raises:
            ConfigError: it is another optimizer, or groups other parameters together.
        """
        optimizer = shard.optimizer
        if not self._groups:  # there is nothing more
            return lambda: None
        beside = {key: tensor for key, tensor in tensors.items() if key in self._beside}
        owned = shard.updating.owned
        if optimizer is None:  # nothing is trained here; the loss may be computed here, though
            return partial(self._apply_common if owned is None else self._apply_all_beside, shard, beside)
        names = {parameter: name for name, parameter in shard.named_parameters()}
        groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        options, origins = [], []
        for index, group in enumerate(optimizer.param_groups):
            found = self._origins(optimizer, [names[parameter] for parameter in group["params"]])
            has = (stage for stage, each in self._stages.items() if len(each["groups"]) > index)
            origin = found[0] if found else (next(has, next(iter(self._stages))), index)
            origins.append(origin)
            options.append(self._options(origin) if found else {})
        state = {
            parameter: {
                key.rpartition(".")[2]: self._value(name, key, tensors, parameter, groups.get(parameter, {}))
                for key in self._keys.get(name, [])
            }
            for parameter, name in names.items()
            if name in self._groups and (owned is None or name in owned)
        }
        return partial(self._apply, shard, options, state, self._scheduler(shard, origins), beside)

    def _origins(self, optimizer: Optimizer, names: list[str]) -> list[tuple[str, int]]:
        """Return of which groups these parameters, of one group here, were."""
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
                raise ConfigError(
                    f"optimizer: parameters of one group here were in groups with other options, "
                    f"{self._options(found[0])} and {self._options(other)}; make the groups as they were"
                )
        return found

    def _options(self, origin: tuple[str, int]) -> dict[str, Any]:
        stage, index = origin
        return dict(self._stages[stage]["groups"][index]["options"])

    def _value(
        self, name: str, key: str, tensors: Mapping[str, Tensor], parameter: nn.Parameter, group: Mapping[str, Any]
    ) -> Any:
        plain = self._plain(name, key)
        if plain is not None:
            return decoded(plain["value"])
        on_host = key in self._stages[self._groups[name][0]].get("on_host", ())
        if key.endswith(".step"):  # where torch wants it, whatever device the checkpoint was written on
            on_host = not (group.get("fused") or group.get("capturable"))
        return tensors[key] if on_host else tensors[key].to(parameter.device)

    def _scheduler(self, shard: Shard, origins: list[tuple[str, int]]) -> Any:
        """Return the state of this stage's scheduler, which may have groups of several stages; None: there is none."""
        if shard.lr_scheduler is None:
            return None
        states = []
        for stage, index in origins:
            state = self._stages[stage].get("scheduler")
            if state is None:
                raise ConfigError("lr_scheduler: the checkpoint was written without one; leave it out")
            states.append((decoded(state), index, len(self._stages[stage]["groups"])))
        return _by_group(states)

    def _apply(
        self,
        shard: Shard,
        options: list[dict[str, Any]],
        state: dict[nn.Parameter, dict[str, Any]],
        scheduler: Any,
        beside: Mapping[str, Tensor],
    ) -> None:
        assert shard.optimizer is not None
        self._apply_all_beside(shard, beside)
        for group, stored in zip(shard.optimizer.param_groups, options, strict=True):
            for key, each in stored.items():
                value, own = decoded(each), group.get(key)
                if isinstance(own, Tensor):  # the user, or a compiled step, holds on to it
                    own.fill_(float(value))
                else:
                    group[key] = value
        shard.optimizer.state.clear()
        for parameter, each_state in state.items():
            shard.optimizer.state[parameter] = each_state
        if shard.lr_scheduler is not None:
            shard.lr_scheduler.load_state_dict(_as_in(shard.lr_scheduler.state_dict(), scheduler))

    def _apply_all_beside(self, shard: Shard, tensors: Mapping[str, Tensor]) -> None:
        self._apply_common(shard, tensors)
        self._apply_beside(shard.updating, tensors)

    def _apply_beside(self, updating: Updating, tensors: Mapping[str, Tensor]) -> None:
        """Set the average of the weights, and the gradients of steps since the last update."""
        told = self._told()
        if updating.average is not None:
            updating.average.num_updates = int(told.get("averaged") or 0)
            for name, average in updating.average.tensors.items():
                if _AVERAGE + name in tensors:
                    average.copy_(tensors[_AVERAGE + name])
        device = {name: parameter.device for name, parameter in updating.parameters.items()}
        updating.held = {}
        for key in (key for key in self._held if key in tensors):
            name, part = self._held[key], tensors[key].to(device[self._held[key]])
            updating.held[name] = updating.held[name] + part if name in updating.held else part
        updating.weight = float(told.get("weight", 0.0))
        updating.restore()

    def _apply_common(self, shard: Shard, tensors: Mapping[str, Tensor]) -> None:
        """Set the scale of the loss, and what batch normalisations have summed up: also where nothing is trained."""
        for name, sums in _sums(shard).items():
            if name in tensors:
                sums.copy_(tensors[name])
        shard.statistics.hold()
        updating, scale = shard.updating, self._told().get("scale")
        if updating.scale.enabled and scale is not None:
            updating.scale.scale, updating.scale.streak = float(scale[0]), int(scale[1])

    def _told(self) -> dict[str, Any]:
        """Return what a stage has described that was trained: all have it alike."""
        return next((each for each in self._stages.values() if each["groups"]), {})

    @property
    def updates(self) -> int:
        """How often the weights had been updated."""
        return max(int(each["updates"]) for each in self._stages.values())


def _as_in(own: Any, stored: Any) -> Any:
    """Return `stored` with dicts of the same types as in `own`: a MultiStepLR, in a SequentialLR too, has a Counter.

    >>> from collections import Counter
    >>> _as_in([{"milestones": Counter([3])}], [{"milestones": {3: 1}}])
    [{'milestones': Counter({3: 1})}]
    """
    if isinstance(own, dict) and isinstance(stored, dict):
        return type(own)({key: _as_in(own.get(key), each) for key, each in stored.items()})
    if isinstance(own, list) and isinstance(stored, list) and len(own) == len(stored):
        return [_as_in(*pair) for pair in zip(own, stored, strict=True)]
    return stored


def _by_group(states: list[tuple[Any, int, int]]) -> Any:
    """Return one scheduler's state for groups whose schedulers were several.

    Args:
        states: for each group the state that it was part of, its index there, and how many groups there were.

    >>> _by_group([({"base_lrs": [1, 2], "last_epoch": 9}, 1, 2), ({"base_lrs": [3], "last_epoch": 9}, 0, 1)])
    {'base_lrs': [2, 3], 'last_epoch': 9}
    """
    first = states[0][0]
    if isinstance(first, dict):
        return {key: _by_group([(state[key], index, of) for state, index, of in states]) for key in first}
    if not isinstance(first, list):
        return first
    if any(isinstance(each, dict) for each in first):  # schedulers inside a scheduler
        return [_by_group([(state[n], index, of) for state, index, of in states]) for n in range(len(first))]
    if all(len(state) == of for state, _, of in states):
        return [state[index] for state, index, _ in states]
    return first


def put(shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    """Make these the numbers of the shard's parameters and buffers, in place."""
    own = model_tensors(shard)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
