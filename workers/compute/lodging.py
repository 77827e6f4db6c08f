"""Weights of a stage on a worker that has several of its replicas: one replica updates them, the rest are its guests.

Each replica has gradients of its own, and buffers, as it sees other rows. Those of one are in place at a time, those of
the host between two actions. So a guest costs the memory of its gradients and buffers, and no second copy of weights or
optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from .gradients import GradientSets
from .module_state import ModuleState, Place
from .recomputation import Recomputation
from .shard import Shard

if TYPE_CHECKING:
    _Shard = Shard
else:
    _Shard = object


class Lodging:
    """The replicas of a stage that share weights.

    Args:
        host: the replica that has the optimizer.
    """

    def __init__(self, host: Shard) -> None:
        self.host = host
        self._gradients = GradientSets(host)
        #: where replicas have buffers of their own, and those of the replicas that are not in place
        self._places: Sequence[Place] = ()
        self._buffers: dict[Shard, Sequence[Tensor | None]] = {}

    def part(self, places: Sequence[Place], buffers: dict[Shard, Sequence[Tensor | None]]) -> None:
        """Let the guests have buffers of their own at some places."""
        self._places, self._buffers = places, buffers

    def turn(self, shard: Shard) -> Shard:
        """Let modules have the gradients and buffers of a replica; return the replica that they were of."""
        before = self._gradients.turn(shard, shard.parameters())
        if before is not shard and self._places:
            self._buffers[before] = [module._buffers[name] for module, name in self._places]
            for (module, name), buffer in zip(self._places, self._buffers.pop(shard), strict=True):
                module._buffers[name] = buffer
        return before

    def turned(self, shard: Shard, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a call during which a replica is in place."""
        before = self.turn(shard)
        try:
            return call(*args)
        finally:
            self.turn(before)


class Guest(_Shard):
    """A shard of which another one on this worker, its host, has the modules, the weights and the optimizer."""

    lodging: Lodging
    is_guest = True

    def train(self, mode: bool) -> None:
        if mode:
            self.state.look_at_modes()

    def state_dict(self) -> dict[str, Tensor]:
        return cast(dict[str, Tensor], self.lodging.turned(self, super().state_dict))

    def abandon(self) -> None:
        self.lodging.turned(self.lodging.host, super().abandon)

    def update(self, *, finite: bool = True) -> None:
        self.statistics.commit()
        self.updating.pass_on()
        self.num_updates += 1


class _OfGuest(Recomputation):
    """Looks at the state of modules while their guest is in place."""

    guest: Guest

    def before_step(self, weights: Collection[nn.Parameter] = ()) -> ModuleState:
        state = self.guest.lodging.turned(self.guest, super().before_step, weights)
        return cast(ModuleState, _Turned(self.guest, state))


class _Turned:
    """The state of modules when their guest is in place."""

    def __init__(self, guest: Guest, state: ModuleState) -> None:
        self._guest, self._state = guest, state

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def does(*args: Any) -> Any:
            found = self._guest.lodging.turned(self._guest, getattr(self._state, name), *args)
            return _Turned(self._guest, found) if isinstance(found, ModuleState) else found

        return does


def lodge(shard: Shard, host: Shard) -> None:
    """Let a replica share weights and optimizer of `host`, another replica of the stage, which alone changes them."""
    host.lodging = shard.lodging = host.lodging or Lodging(host)
    shard.__class__ = type("Guest", (Guest, type(shard)), {})
    shard.recomputation.__class__, vars(shard.recomputation)["guest"] = _OfGuest, shard
    shard.updating.lodge(host.updating)
    shard.go_on_at(host.num_updates, host.updating.count)
