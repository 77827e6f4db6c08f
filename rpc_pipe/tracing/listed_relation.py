"""The spec that the listings of all workers make together, so that a run can be simulated without its code.

A watcher does not have the class of the user's schedule and must not run the user's script. Each worker writes its part
of the relation (`own_boards.list_program`); the parts of all workers are the whole relation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from ..dependency import Action, ConfigError, Order, Spec, updates_a_step


def spec_of_listings(listings: Sequence[Mapping[str, Any]], num_microbatches: int | None = None) -> Spec:
    """Return the spec of the listings of all workers, in order of workers.

    Args:
        num_microbatches: of a smaller batch; later microbatches are left out.

    Raises:
        ConfigError: the listings do not fit together.
    """
    try:
        relation = _Listings(listings, num_microbatches)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"listing: cannot be read: {error}") from error
    every = listings[0].get("update_every", Spec.update_every)
    own = {"relation": relation, "synchronous": relation.period is None, "update_every": every}
    own["replicas"] = listings[0].get("replicas", 1)
    own["slice_sizes"] = tuple(listings[0].get("slices", Spec.slice_sizes))
    cls: type[ListedRelation] = type(listings[0]["schedule"], (ListedRelation,), own)
    return cls(num_workers=len(listings), num_microbatches=relation.num_microbatches)


class _Listings:
    def __init__(self, listings: Sequence[Mapping[str, Any]], num_microbatches: int | None) -> None:
        self.order: Order = listings[0]["order"]
        self.num_microbatches: int = num_microbatches or listings[0]["microbatches"]
        self.routes: list[int] = listings[0]["routes"]
        self.place: dict[tuple[int, int], int] = {
            (stage, route): worker for worker, own in enumerate(listings) for stage, route in own["shards"]
        }
        #: (number of steps before, action)
        self.needs: dict[Action, list[tuple[int, Action]]] = {}
        self.slots: dict[Action, int] = {}
        for listing in listings:
            slots = listing.get("slots") or range(len(listing["program"]))
            earlier = listing.get("earlier") or [()] * len(listing["program"])
            for slot, (name, *needs), before in zip(slots, listing["program"], earlier, strict=True):
                action = Action.parse(name)
                if action.index < self.num_microbatches:
                    self.slots[action] = slot
                    parsed = [(0, Action.parse(need)) for need in needs]
                    parsed += [(back, Action.parse(need)) for back, need in before]
                    self.needs[action] = [(back, need) for back, need in parsed if need.index < self.num_microbatches]
        #: of a stream of overlapping steps: growth of slots from step to step
        self.period: int | None = listings[0].get("period")
        self.num_stages: int = 1 + max(stage for stage, _ in self.place)
        self.num_routes: int = 1 + max(route for _, route in self.place)

    @cached_property
    def done(self) -> dict[tuple[int, int], tuple[Action, ...]]:
        """The actions by (stage, microbatch of a step), in order."""
        found: dict[tuple[int, int], list[Action]] = {}
        for action in sorted(self.slots, key=self.slots.__getitem__):
            if action.kind.per_microbatch:
                found.setdefault((action.stage, action.index), []).append(action)
        return {place: tuple(actions) for place, actions in found.items()}


class ListedRelation(Spec):
    """A schedule whose relation is listed action by action."""

    relation: ClassVar[_Listings]

    @property
    def num_stages(self) -> int:
        return self.relation.num_stages

    @property
    def num_routes(self) -> int:
        return self.relation.num_routes

    @property
    def order(self) -> Order:
        return self.relation.order

    def place(self, stage: int, route: int) -> int:
        return self.relation.place[stage, route]

    def route(self, microbatch: int) -> int:
        return self.relation.routes[microbatch % self.num_microbatches] if self.relation.routes else 0

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        step, m = divmod(microbatch, self.num_microbatches)
        done = self.relation.done[stage, m]
        return tuple([self._of(step, action) for action in done]) if step else done

    def after(self, action: Action) -> Iterable[Action]:
        step, own = self._within(action)
        found = self.relation.needs.get(own, ())
        return [self._of(step - back, need) for back, need in found if self.orders(need) and step >= back]

    def slot(self, action: Action) -> int:
        step, own = self._within(action)
        return self.relation.slots[own] + step * (self.relation.period or 0)

    def version(self, stage: int, microbatch: int) -> int:
        return 0  # the listed needs say it

    def _within(self, action: Action) -> tuple[int, Action]:
        """Return the step of an action of a stream, and the action within that step."""
        step, index = divmod(action.index, self._per_step(action))
        return step, action._replace(index=index)

    def _of(self, step: int, action: Action) -> Action:
        return action._replace(index=action.index + step * self._per_step(action))

    def _per_step(self, action: Action) -> int:
        return self.num_microbatches if action.kind.per_microbatch else updates_a_step(self)
