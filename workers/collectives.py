"""The refusal of layers with collectives of their own, where torch.distributed is in use without members."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..dependency import ConfigError, Order, Part, W
from .compute.shard import Shard


def refuse_collectives(part: Part, order: Order, shards: Iterable[Shard]) -> None:
    """Refuse stages of several devices where their collectives would go wrong.

    Raises:
        ConfigError: backward is split, which goes round the hooks of sharded parameters, or actions run in the order in
            which inputs arrive, so that collectives of different microbatches would meet.
    """
    splits = any(entry.action.kind is W for entry in part.entries)
    for shard in shards if splits or order == "ready" else ():
        sharded = any(type(parameter).__name__ == "DTensor" for parameter in shard.parameters())
        if sharded or (order == "ready" and any(isinstance(module, nn.SyncBatchNorm) for module in shard.slice.own)):
            raise ConfigError(
                f"stage {shard.stage}: layers make collectives (DTensor, as by fully_shard, or SyncBatchNorm), which "
                "have to come in one order on all devices, those of gradients behind a whole backward: pass "
                'order="fixed", and for DTensor a schedule that does not split backward, such as 1f1b'
            )
