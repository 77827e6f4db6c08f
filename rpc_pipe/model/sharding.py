"""How a model is shared: layers among stages, and a stage among the members of a worker. Loads without torch.

So a wrong cut is refused before workers start. Members share a stage by name, or by the user's function of (layer or
block, mesh).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dependency import ConfigError, ModelError, Order
from ..dependency.declared import FSDP
from ..dependency.pipeline_options import Options

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy


def cut(num_layers: int, num_stages: int, split: Sequence[int] | None = None) -> list[range]:
    """Return the layers of each stage: as `split` counts them, or as evenly as possible.

    Raises:
        ModelError: a stage would be left without a layer, or `split` does not add up.

    >>> cut(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    if split is None:
        if num_stages > num_layers:
            raise ModelError(f"num_workers: {num_stages} stages, and {num_layers} layers or blocks; take fewer workers")
        small, larger = divmod(num_layers, num_stages)
        split = [small + (stage < larger) for stage in range(num_stages)]
    if not isinstance(split, Sequence) or isinstance(split, str):
        raise ModelError(f"split {split!r}: must be a list with the number of layers of each stage, such as [3, 2, 2]")
    if len(split) != num_stages or sum(split) != num_layers or min(split) < 1:
        sizes = f"{num_stages} numbers of at least 1 with the sum {num_layers}, the layers or blocks of this model"
        raise ModelError(f"split {list(split)}: must be {sizes}; a plan is of one model, schedule and workers")
    starts = [sum(split[:stage]) for stage in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, split, strict=True)]


logger = logging.getLogger(__name__)

#: (a layer or block, the mesh of the members) -> nothing, or the module to use in its place
ShardFn = Callable[["nn.Module", Any], Any]


@dataclass(frozen=True)
class Sharing:
    """How many processes are one worker, and how they share its stages."""

    count: int = 1
    #: `fsdp`, `fsdp-kept`, `tp` or the user's function
    shard: str | ShardFn | None = None
    #: whether gradients are summed over members after each microbatch
    per_microbatch: bool = False
    #: types in which `fsdp` computes and sums; None: the types of the parameters
    policy: MixedPrecisionPolicy | None = None

    def __post_init__(self) -> None:
        if self.count > 1 and not self.shard:
            raise ConfigError(f"members={self.count}: needs shard=, such as fsdp, tp or a function of (module, mesh)")
        if not isinstance(self.planes, int) or self.planes < 1 or self.count % self.planes:
            raise ConfigError(f"members={self.count} rows={self.planes}: parts of members; take a divisor, or True")

    @property
    def is_parted(self) -> bool:
        """Whether layers may compute with parts of a tensor."""
        return self.count > 1 and self.shard not in FSDP

    @property
    def planes(self) -> int:
        """Number of parts of a step's microbatches, for members to take; neighbours that are alike have one part.

        A function sets it by an attribute `rows`: a number, or True for one part a member.
        """
        rows = True if self.shard in FSDP else getattr(self.shard, "rows", False)
        return self.count if rows is True else rows or 1

    def order(self, asked: Order | None, usual: Order) -> Order:
        """Return the order of actions."""
        return "fixed" if self.count > 1 else asked or usual

    def microbatches(self, count: int) -> int:
        """Return the number of microbatches of a plane.

        Raises:
            ConfigError: they cannot be divided among members.
        """
        if count % self.planes:
            raise ConfigError(f"num_microbatches={count} members={self.count}: each takes as many; take a multiple")
        return count // self.planes


def settle_sharing(options: Options) -> Sharing:
    """Return how members share stages.

    Raises:
        ConfigError: the options cannot be combined.
    """
    if options.mp_policy is not None and options.shard not in FSDP:
        raise ConfigError(f"mp_policy shard={options.shard!r}: of fsdp alone; in a function pass it to fully_shard")
    if options.members == 1:
        if options.shard is not None:
            logger.warning("shard=%s: divides nothing, as each worker is one process; add members=2", options.shard)
        return Sharing()  # the same script runs on one process a worker
    return Sharing(options.members, options.shard, options.reduce == "microbatch", options.mp_policy)
