"""Changes of modules by a function of the user, on all workers alike."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, reduce

import torch
from torch import nn

from .checkpoints.collective import together
from .dependency import ConfigError
from .session import Session
from .workers.actor import WorkerActor


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
