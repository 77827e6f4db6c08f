"""Buffers that forwards change, such as running statistics: each replica of a stage has the buffers of all replicas.

A replica gives its buffers with the gradients that its peers sum. So where a step commits, all replicas have them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch_norm import is_deferred
from .module_state import INSIDE, ModuleState, Place, Probe


class BufferMirror:
    """The buffers of all replicas of a stage, as one replica has them.

    Args:
        shard: the replica, a `Shard`.
        route: its number.

    Attributes:
        held: by replica, its buffers by name after the last step that has committed.
        changes_more: whether forwards change more than buffers, as far as it is known.
    """

    def __init__(self, shard: Any, route: int) -> None:
        self._modules = shard.slice.own
        self._shard, self._route = shard, route
        self.held: dict[int, dict[str, Tensor]] = {}
        #: the same of the step under way
        self._taken: dict[int, dict[str, Tensor]] = {}
        self._given: dict[str, Tensor] | None = None
        self.changes_more = False
        self._probe = Probe(self._modules)
        #: the state after the last step, if the next one is observed, and where steps have changed modules
        self._before: ModuleState | None = None
        self._changed = set[Place]()

    @property
    def _places(self) -> dict[str, Place]:
        """By name, where the stage has buffers."""
        return {
            f"{number} {name}": (module, name)
            for number, module in enumerate(self._shard.slice.own)
            for name, buffer in module._buffers.items()
            if buffer is not None and not getattr(type(buffer), "of_another_worker", False)
        }

    @property
    def changing(self) -> dict[str, Place]:
        """By name, where forwards change buffers: all buffers, until that has been observed.

        Without deferred batch normalisations, which are alike in all replicas after an update.
        """
        is_due, places = self._probe.is_due(), self._places.items()
        return {k: p for k, p in places if not is_deferred(p[0]) and (is_due or p in self._changed)}

    def give(self) -> dict[str, Tensor]:
        """Return copies of this replica's buffers, behind the last forward of a step."""
        if self._given is None:
            self._given = {key: getattr(*place).clone() for key, place in self.changing.items()}
        return self._given

    def _look(self) -> None:
        """Observe a step that commits, if it is one of the first in these modes; an undone one has the same numbers."""
        before, self._before = self._before, None
        if before is not None and self._probe.is_of_now(before):
            changed = self._probe.note(before)
            self.changes_more |= any(name not in {*m._buffers, "_buffers" + INSIDE} for m, name in changed)
            self._changed |= changed
        if self._probe.is_due():
            self._before = self._probe.before()

    def take(self, given: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the buffers of all replicas, in order."""
        self._taken = {route: dict(each) for route, each in enumerate(given)}

    def commit(self) -> None:
        """Take over the buffers of a step that commits."""
        self._look()
        for route, taken in self._taken.items():
            self.held[route] = self.held.get(route, {}) | taken
        self._taken, self._given = {}, None

    def forget(self) -> None:
        """Forget the buffers of a step that is undone."""
        self._taken, self._given = {}, None

    def put(self, held: Mapping[str, Tensor], prefix: str) -> None:
        """Take over the buffers of another replica, and this one's with them; names are `prefix`, replica/name."""
        self.held = {}
        for name in (name for name in held if name.startswith(prefix)):
            route, _, key = name.removeprefix(prefix).partition("/")
            self.held.setdefault(int(route), {})[key] = held[name]
        places = self._places
        for key, tensor in self.held.get(self._route, {}).items():
            getattr(*places[key]).copy_(tensor)

    def share(self, routes: int) -> None:
        """Have this replica's buffers for all of `routes` replicas."""
        own = {key: getattr(*place).clone() for key, place in self._places.items()}
        self.held = dict.fromkeys(range(routes), own)

    @property
    def is_stale(self) -> bool:
        """Whether buffers have changed since the last step that has committed."""
        own, places = self.held.get(self._route), self._places
        if own is None:
            return bool(self._shard.num_updates and self.changing)
        return any(not torch.equal(tensor, getattr(*places[key])) for key, tensor in own.items() if key in places)

    def parted(self, routes: Sequence[int]) -> tuple[list[Place], list[list[Tensor]]]:
        """Return where the stage has buffers, and copies of some replicas' buffers."""
        now = {key: getattr(*place) for key, place in self._places.items()}
        held = (self.held.get(route, {}) for route in routes)
        # A buffer may have several names.
        copies = [{tensor: each.get(key, tensor).clone() for key, tensor in now.items()} for each in held]
        return [*self._places.values()], [[each[tensor] for tensor in now.values()] for each in copies]


def mirror_of(shard: Any) -> BufferMirror:
    """Return the mirror of a shard of an elastic job."""
    mirror: BufferMirror = shard.mirror
    return mirror
