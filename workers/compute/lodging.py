"""Weights of a stage on a worker that has several of its replicas: one replica updates them, the rest are its guests.

Each replica has separate gradients and buffers, as it sees different rows. The modules have one replica's set at a
time, and the host's set between two actions. So a guest costs the memory of its gradients and buffers, and no second
copy of weights or optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .gradients import GradientSets
from .module_state import Place
from .shard import Shard


class Lodging:
    """The replicas of a stage that share weights.

    Args:
        host: the replica that has the optimizer.
    """

    def __init__(self, host: Shard) -> None:
        self.host = host
        self._gradients = GradientSets(host)
        #: places of the buffers that differ between replicas; the buffers of the replicas that are not in place
        self._places: Sequence[Place] = ()
        self._buffers: dict[Shard, Sequence[Tensor | None]] = {}

    def part(self, places: Sequence[Place], buffers: dict[Shard, Sequence[Tensor | None]]) -> None:
        """Let the guests have separate buffers at some places."""
        self._places, self._buffers = places, buffers

    def turn(self, shard: Shard) -> Shard:
        """Put a replica's gradients and buffers into the modules; return the replica that had them in place before."""
        before = self._gradients.turn(shard, shard.parameters())
        if before is not shard and self._places:
            self._buffers[before] = [module._buffers[name] for module, name in self._places]
            for (module, name), buffer in zip(self._places, self._buffers.pop(shard), strict=True):
                module._buffers[name] = buffer
        return before


class Guest(Shard):
    """A shard that shares the modules, weights and optimizer of another shard on this worker, its host."""

    lodging: Lodging
    is_guest = True

    def train(self, mode: bool) -> None:
        if mode:
            self.state.look_at_modes()

    def state_dict(self) -> dict[str, Tensor]:
        before = self.lodging.turn(self)
        found = super().state_dict()
        self.lodging.turn(before)
        return found

    def abandon(self) -> None:
        super().abandon()
        self.lodging.turn(self.lodging.host)

    def update(self, *, finite: bool = True, skipped: bool = False) -> None:
        self.statistics.commit()
        updating = self.updating  # its host has the sums, and updates
        updating.held, updating.weight = {}, 0.0
        for parameter in updating.parameters.values():
            parameter.grad = None
        updating.count += updating.optimizer is not None
        self.num_updates += 1


def lodge(shard: Shard, host: Shard) -> None:
    """Let a replica share weights and optimizer of `host`, another replica of the stage, which alone changes them."""
    host.lodging = shard.lodging = host.lodging or Lodging(host)
    shard.__class__ = Guest
    own, its = shard.updating, host.updating  # to be read
    own.training, own.optimizer, own.lr_scheduler, own.owned = its.training, its.optimizer, its.lr_scheduler, its.owned
    own.scale, own.average, own.on_gradients = its.scale, its.average, its.on_gradients
    shard.go_on_at(host.num_updates, host.updating.count)
