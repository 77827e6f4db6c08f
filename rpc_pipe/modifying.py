"""Changes of modules and gradients by functions of the user."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial, reduce

import torch
from torch import nn

from .checkpoints.collective import together
from .dependency import ConfigError
from .session import Session
from .workers.actor import WorkerActor

logger = logging.getLogger(__name__)


def modify(session: Session, function: Callable[[int, list[nn.Module]], object], summed: Collection[str]) -> None:
    """Call `function(stage, modules)` for each stage of this process; arguments as of `Pipeline.modify`."""
    if summed:
        session.each(lambda actor: _sum_buffers(actor, summed, session.spec.num_routes))
    changed: set[WorkerActor] = set()

    def change(actor: WorkerActor) -> None:
        # Once, even if the call is made again because another worker has died.
        for (stage, _), shard in actor.shards.items() if actor not in changed else ():
            if not shard.is_guest:
                function(stage, shard.slice.modules)
            if shard.outside_updates is not None and shard.outside_updates.pulled is not None:
                shard.outside_updates.refuse()
        changed.add(actor)

    session.each(lambda actor: together(actor, "modify", partial(change, actor)))


@torch.no_grad()
def _sum_buffers(actor: WorkerActor, names: Collection[str], num_routes: int) -> None:
    """Let buffers of these names be their sums over the replicas of their stage, added in the order of replicas.

    Raises:
        ConfigError: no module has a buffer of one of these names.
    """
    own = {
        (stage, route, f"{place}.{name}"): buffer
        for (stage, route), shard in actor.shards.items()
        for place, module in enumerate(shard.slice.own)
        for name, buffer in module._buffers.items()
        if name in names and buffer is not None
    }
    # Copies: workers that are threads would read values that other workers have written already.
    copies = {f"{stage}/{route}/{name}": buffer.clone() for (stage, route, name), buffer in own.items()}
    told = {key: copy for each in actor.exchange("buffers to sum", copies) for key, copy in each.items()}
    if missing := set(names) - {key.rpartition(".")[2] for key in told}:
        raise ConfigError(f"modify: summed={min(missing)!r}: no module has a buffer of that name")
    for (stage, _, name), buffer in own.items():
        buffer.copy_(reduce(torch.add, [told[f"{stage}/{route}/{name}"] for route in range(num_routes)]))


def call_on_gradients(session: Session, stage: int, function: Callable[[Mapping[str, nn.Parameter]], object]) -> None:
    """Call `function(parameters)` between backward and update; arguments as of `Pipeline.on_gradients`."""
    if stage not in range(session.spec.num_stages) or not callable(function):
        most = session.spec.num_stages - 1
        raise ConfigError(f"on_gradients {stage!r}, {function!r}: takes a stage from 0 to {most}, and a function")

    one_of_many = partial(_of_a_stage, stage, function) if session.spec.num_stages > 1 else function

    def add(actor: WorkerActor) -> None:
        for (each, _), shard in actor.shards.items():
            if each == stage and not shard.is_guest:
                shard.updating.on_gradients.append(one_of_many)

    session.each(add)


@cache
def _warn_of_dropped(stage: int) -> None:
    fix = "Training(skip_update=) decides by the norm of the whole model, on all stages alike"
    logger.warning("on_gradients: leaves out the update of stage %d, by this stage alone: %s", stage, fix)


def _of_a_stage(stage: int, function: Callable[..., object], parameters: Mapping[str, nn.Parameter]) -> None:
    """Call a user's function; a decision by the gradients of one stage depends on the number of stages."""
    had = any(parameter.grad is not None for parameter in parameters.values())
    function(parameters)
    if had and all(parameter.grad is None for parameter in parameters.values()):
        _warn_of_dropped(stage)
