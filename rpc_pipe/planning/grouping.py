"""The costs of a model on workers with members: parts of its bytes, gathers and sums beside its compute.

By `fsdp` the members of a worker divide microbatches, and gather a block's parameters before each forward and backward,
by `fsdp-kept` once a step.
By `tp` all members compute all microbatches, and add up their parts of a block's results. Loads without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..dependency import B, F, G, I, Kind, R, U, W
from ..dependency.declared import FSDP, FSDP_KEPT
from ..model.sharding import Sharing
from .footprint import Size
from .profile import RESIDENT, LayerCost
from .simulator import Link

#: a link that takes no time
_NO_WAY = Link()


@dataclass(frozen=True)
class Grouping:
    """How many processes are one worker, and how they share its stages."""

    count: int = 1
    shard: str = ""
    reduce: str = "step"
    #: between the members of a worker
    link: Link = _NO_WAY

    def workers(self, processes: int) -> int:
        """Return how many workers processes are."""
        return processes // self.count

    @property
    def planned(self) -> dict[str, Any]:
        """The fields for a plan."""
        return {"members": self.count, "shard": self.shard, "reduce": self.reduce}

    @property
    def planes(self) -> int:
        """Among how many members the microbatches of a step are divided."""
        return Sharing(self.count, self.shard).planes

    @property
    def _gathers(self) -> bool:
        return self.shard in FSDP

    def times(self, took: Mapping[Kind, float], gather: float, total: float, part: float = 1) -> dict[Kind, float]:
        """Return the times of a block or stage, from the times of one process.

        Args:
            gather: time to gather its parameters (fsdp), or to add up its outputs (tp).
            total: time to add up the gradients of its parameters (fsdp), or of its inputs (tp).
            part: which part of its parameters the members divide.
        """
        kept, found = 1 - part * (1 - 1 / self.count), dict(took)
        divided = (U, G) if self._gathers else tuple(took)
        found |= {kind: took[kind] * kept for kind in divided if kind in took}
        once = gather if self.shard == FSDP_KEPT else 0
        more = dict.fromkeys((F, R, B, I), gather - once) | {U: once}
        if self.shard == "tp":
            more |= {B: total, I: total}
        elif self.reduce == "microbatch":
            more |= {B: more[B] + total, W: total}
        else:
            more[U] += total
        return found if self.count == 1 else found | {kind: found.get(kind, 0) + add for kind, add in more.items()}

    def size(self, size: Size, divided: float) -> Size:
        """Return the bytes of a block on each member; members divide `divided` bytes of the weights."""
        part = divided / size.weights if size.weights else 0
        away = {name: getattr(size, name) * part * (1 - 1 / self.count) for name in RESIDENT}
        here = {name: getattr(size, name) - amount for name, amount in away.items()} | {"elsewhere": away["weights"]}
        if self._gathers:
            kept = divided if self.shard == FSDP_KEPT else 0
            here["working"] = size.working + divided - kept + size.gradients * part
            here["unsummed"] = away["gradients"] * (self.reduce == "step") + kept
        return replace(size, **here)

    def cost(self, cost: LayerCost) -> LayerCost:
        """Return the costs of a block, from the costs of one process."""
        if self.count == 1:
            return cost
        size, about = cost.size, cost.divided
        divided = about.get(self.shard, about.get("fsdp", size.weights))
        trained = size.gradients / size.weights if size.weights else 0
        if self._gathers:
            around = size.gradients - divided * trained  # of parameters that each member keeps whole
            gather = self._time(1, divided)
            total = self._time(1, divided * trained)
            total += self.count * (self.link.latency + around / self.link.bandwidth) if around else 0
        else:
            gather = self._time(2 * about.get("outputs", 0), size.outputs)
            total = self._time(2 * about.get("inputs", 0), size.inputs or size.outputs)
        part = divided / (size.weights or 1 if self._gathers else about.get("fsdp", size.weights) or 1)
        return replace(cost, times=self.times(cost.times, gather, total, part), size=self.size(size, divided))

    def _time(self, rounds: float, amount: float) -> float:
        """Return the time for `amount` bytes, of which each member has a part, to travel around the members."""
        once = (self.count - 1) * (self.link.latency + amount / self.count / self.link.bandwidth)
        return rounds * once if amount else 0


#: each process is a worker
ALONE = Grouping()
